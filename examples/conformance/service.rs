//! The service that is asked, and its answers.

use std::{io, time::Duration};

use actix_web::rt::time::sleep;
use reqwest::{
    Client, Method, RequestBuilder, StatusCode,
    header::{CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, LOCATION},
    redirect::Policy,
};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::options::{Options, Pair};

pub const KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Far beyond what a handler may take, so that a service which hangs is a row and not the end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// When the client goes. Any moment of the request will do.
const RESET_AFTER: Duration = Duration::from_millis(200);

pub struct Service {
    pub options: Options,
    client: Client,
}

/// A first request that was answered, on which the others stand.
pub struct Ground {
    pub key: HeaderValue,
    pub first: Answer,
    /// Whether another key gets another answer. Else an answer does not tell whether it is a replay.
    is_telling: bool,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Service {
    pub fn new(options: Options) -> Self {
        // A connection for each request: no two of them meet in one worker by chance.
        let client = Client::builder().pool_max_idle_per_host(0).redirect(Policy::none()).timeout(TIMEOUT).build();
        Self { options, client: client.expect("settings that do not depend on anything") }
    }

    pub async fn ground(&self) -> Result<Ground, String> {
        let key = self.key();
        let first = answer(self.operation(Some(&key))).await.map_err(|error| error.to_string())?;
        if !first.is_success() {
            return Err(format!("the first request got {}: {}", first.status, String::from_utf8_lossy(&first.body)));
        }
        let other = answer(self.operation(Some(&self.key()))).await.map_err(|error| error.to_string())?;
        Ok(Ground { is_telling: !first.is_told_by(&other), key, first })
    }

    /// One that nobody has used.
    pub fn key(&self) -> HeaderValue {
        let key = uuid::Builder::from_random_bytes(rand::random()).into_uuid();
        let key = if self.options.bare { key.to_string() } else { format!("\"{key}\"") };
        key.try_into().expect("visible ASCII characters")
    }

    /// The operation, under this key or none.
    pub fn operation(&self, key: Option<&HeaderValue>) -> RequestBuilder {
        self.request(self.options.method.clone(), key).body(self.options.body.clone())
    }

    pub fn request(&self, method: Method, key: Option<&HeaderValue>) -> RequestBuilder {
        let request = self.client.request(method, self.options.url.clone()).headers(self.options.headers.clone());
        match key {
            Some(key) => request.header(KEY, key),
            None => request,
        }
    }

    /// What the service links to: nobody's credentials go there.
    pub async fn linked(&self, link: &str) -> Result<Answer, String> {
        let url = self.options.url.join(link).map_err(|error| error.to_string())?;
        answer(self.client.get(url)).await.map_err(|error| error.without_url().to_string())
    }

    /// Sends the operation whole, and resets the connection while it runs.
    pub async fn reset(&self, key: &HeaderValue) -> io::Result<()> {
        let Options { url, method, body, headers, slow, .. } = &self.options;
        let mut socket = TcpStream::connect(&url.socket_addrs(|| None)?[..]).await?;
        let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
        let mut request =
            format!("{method} {}{query} HTTP/1.1\r\ncontent-length: {}\r\n", url.path(), body.len()).into_bytes();
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        let host = format!("{}{port}", url.host_str().unwrap_or_default());
        let host = HeaderValue::try_from(host).map_err(io::Error::other)?;
        let mut all = headers.clone();
        all.extend(slow.clone().into_iter().chain([(reqwest::header::HOST, host), (KEY, key.clone())]));
        for (name, value) in &all {
            request.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
        }
        request.extend([b"\r\n", body.as_bytes()].concat());
        socket.write_all(&request).await?;
        sleep(RESET_AFTER).await;
        socket.set_zero_linger()
    }
}

impl Ground {
    /// Whether `again` shows that it was not done again. `None` where nothing can show it.
    pub fn shows_replay(&self, first: &Answer, again: &Answer) -> Option<bool> {
        match first.is_told_by(again) {
            false => Some(false),
            true => (self.is_telling || again.is_marked()).then_some(true),
        }
    }
}

impl Answer {
    pub fn is_success(&self) -> bool {
        self.status.as_u16() < 400
    }

    /// Byte for byte, and with the headers that belong to the answer rather than to the exchange.
    pub fn is_told_by(&self, other: &Self) -> bool {
        let all = |headers: &HeaderMap, name| headers.get_all(name).iter().cloned().collect::<Vec<_>>();
        self.status == other.status
            && self.body == other.body
            && [CONTENT_TYPE, LOCATION, ETAG].iter().all(|name| all(&self.headers, name) == all(&other.headers, name))
    }

    /// `Idempotency-Replayed: true`, under whatever name.
    pub fn is_marked(&self) -> bool {
        self.headers.iter().any(|(name, value)| name.as_str().ends_with("-replayed") && value == "true")
    }
}

pub async fn answer(request: RequestBuilder) -> reqwest::Result<Answer> {
    let response = request.send().await?;
    let (status, headers) = (response.status(), response.headers().clone());
    Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
}

/// In place of a header of the same name.
pub fn with(request: RequestBuilder, pair: Option<&Pair>) -> RequestBuilder {
    request.headers(pair.cloned().into_iter().collect())
}
