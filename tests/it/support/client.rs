//! Requests and answers, and raw sockets for what no client would send.

use std::{io, net::SocketAddr};

use actix_web::rt::time::timeout;
use reqwest::{
    Client, RequestBuilder, StatusCode,
    header::{HeaderMap, HeaderName, HeaderValue},
    redirect::Policy,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::PATIENCE;

/// An answer, read to its end.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("no JSON ({error}): {}", self.text()))
    }

    /// The stable code of a refusal, which must be problem+json.
    #[track_caller]
    pub fn code(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{}: {}", self.status, self.text());
        let problem = self.json();
        assert_eq!(problem["status"], self.status.as_u16());
        assert!(problem["title"].is_string() && problem["detail"].is_string() && problem["type"].is_string());
        problem["code"].as_str().unwrap().to_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    pub fn retry_after(&self) -> Option<u64> {
        self.header("retry-after").map(|seconds| seconds.parse().unwrap())
    }

    /// The same answer, told a second time: status, body, and all headers but those that a replay
    /// makes anew.
    #[track_caller]
    pub fn assert_replayed_by(&self, replay: &Self) {
        assert!(!self.is_replay() && replay.is_replay(), "first: {self:?}\nreplay: {replay:?}");
        assert_eq!(self.status, replay.status);
        assert_eq!(self.body, replay.body);
        assert_eq!(self.lasting_headers(), replay.lasting_headers());
    }

    fn lasting_headers(&self) -> Vec<(HeaderName, Vec<Vec<u8>>)> {
        let mut headers: Vec<_> = self
            .headers
            .keys()
            .filter(|name| !["date", "idempotency-replayed"].contains(&name.as_str()))
            .map(|name| (name.clone(), self.headers.get_all(name).iter().map(|v| v.as_bytes().to_vec()).collect()))
            .collect();
        headers.sort_by(|(a, _), (b, _)| a.as_str().cmp(b.as_str()));
        headers
    }
}

/// A client whose every request has a connection of its own: no two of them share a worker by chance.
/// It follows no redirect.
pub fn client() -> Client {
    Client::builder().pool_max_idle_per_host(0).redirect(Policy::none()).timeout(PATIENCE).build().unwrap()
}

pub trait RequestExt {
    /// With `Idempotency-Key`.
    fn key(self, key: &str) -> Self;
    /// With `Authorization: Bearer`.
    fn user(self, name: &str) -> Self;
    fn answer(self) -> impl Future<Output = Answer> + Send;
    /// The same, where the server may go away meanwhile.
    fn try_answer(self) -> impl Future<Output = reqwest::Result<Answer>> + Send;
}

impl RequestExt for RequestBuilder {
    fn key(self, key: &str) -> Self {
        self.header("Idempotency-Key", key)
    }

    fn user(self, name: &str) -> Self {
        self.bearer_auth(name)
    }

    async fn answer(self) -> Answer {
        self.try_answer().await.unwrap()
    }

    async fn try_answer(self) -> reqwest::Result<Answer> {
        let response = self.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
    }
}

/// Sends bytes as they are.
pub struct Raw(TcpStream);

impl Raw {
    pub async fn connect(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.unwrap())
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.0.write_all(bytes.as_ref()).await?;
        self.0.flush().await
    }

    /// Until the end of the head; the body, if any, is left unread.
    pub async fn head(&mut self) -> String {
        let mut head = Vec::new();
        let read = async {
            while !head.ends_with(b"\r\n\r\n") {
                match self.0.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => break,
                }
            }
        };
        timeout(PATIENCE, read).await.expect("the server should answer");
        String::from_utf8_lossy(&head).into_owned()
    }

    /// The next answer, its body included.
    pub async fn answer(&mut self) -> Answer {
        let head = self.head().await;
        let mut lines = head.split("\r\n");
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_else(|| panic!("no answer: {head}"));
        let headers: HeaderMap = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap()))
            .collect();
        let length = headers.get("content-length").map_or(0, |length| length.to_str().unwrap().parse().unwrap());
        let mut body = vec![0; length];
        timeout(PATIENCE, self.0.read_exact(&mut body)).await.expect("the body should come").unwrap();
        Answer { status: status.parse().unwrap(), headers, body }
    }

    /// Half-closes: the server sees the end of the request.
    pub async fn finish(&mut self) {
        let _ = self.0.shutdown().await;
    }

    /// Closes with a RST, which makes actix drop the request's future.
    pub fn reset(self) {
        self.0.set_zero_linger().unwrap();
        drop(self.0);
    }
}

/// A POST as text, for [`Raw`].
pub fn post(path: &str, key: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}
