//! Who asks: a connection for each request, and one that is reset.

use std::{io, time::Duration};

use reqwest::{
    Url,
    header::{HOST, HeaderValue},
    redirect::Policy,
};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    answer::{Answer, Heard, Silence},
    request::Request,
};

pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
    patience: Duration,
}

impl Client {
    /// # Errors
    ///
    /// What is wrong with the URL, in words.
    pub(super) fn new(url: &str, patience: Duration) -> Result<Self, String> {
        // The text may hold a password, so that only what could be read is told again.
        let base = Url::parse(url).map_err(|error| format!("the URL of the service cannot be read: {error}"))?;
        let wrong = match () {
            () if base.scheme() != "http" => "http:// only, there is no TLS here",
            () if !base.username().is_empty() || base.password().is_some() => {
                "a credential belongs into a header of the request, not into the URL"
            }
            () if base.query().is_some() || base.fragment().is_some() => {
                "path and query belong to the request, not to the URL of the service"
            }
            () => {
                // A connection for each request, so that no two meet in one worker by chance; and nothing is sent twice
                // but by us.
                let http = reqwest::Client::builder()
                    .pool_max_idle_per_host(0)
                    .redirect(Policy::none())
                    .retry(reqwest::retry::never())
                    .no_proxy()
                    .timeout(patience)
                    .build()
                    .map_err(|error| error.to_string())?;
                return Ok(Self { http, base, patience });
            }
        };
        Err(format!("{}://{}: {wrong}", base.scheme(), base.host_str().unwrap_or_default()))
    }

    pub(super) async fn send(&self, request: &Request) -> Heard {
        let Request { method, headers, .. } = request;
        let sent = self.http.request(method.clone(), self.url(request)?).headers(headers.clone()).body(request.bytes());
        let response = sent.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
    }

    /// Sends the request whole, and resets the connection (RST) after this while, whatever has been answered by then.
    pub(super) async fn reset(&self, request: &Request, after: Duration) -> io::Result<()> {
        let url = self.url(request).map_err(|silence| io::Error::other(silence.to_string()))?;
        let host = url.host_str().unwrap_or_default();
        let address = format!("{host}:{}", url.port_or_known_default().unwrap_or(80));
        let sending = async {
            let mut socket = TcpStream::connect(address).await?;
            // Before anything is sent: if this future is dropped half-way, that is a reset too.
            socket.set_zero_linger()?;
            socket.set_nodelay(true)?;
            socket.write_all(&on_the_wire(request, &url)?).await?;
            Ok::<_, io::Error>(socket)
        };
        let _until_it_is_dropped = timeout(self.patience, sending).await.map_err(io::Error::other)??;
        sleep(after).await;
        Ok(())
    }

    fn url(&self, request: &Request) -> Result<Url, Silence> {
        if request.path.is_empty() {
            return Ok(self.base.clone());
        }
        let whole = format!("{}{}", self.base.as_str().trim_end_matches('/'), request.path);
        Url::parse(&whole).map_err(|error| Silence::Unreachable(error.to_string()))
    }
}

/// As HTTP/1.1 writes it.
fn on_the_wire(request: &Request, url: &Url) -> io::Result<Vec<u8>> {
    let body = request.bytes();
    let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
    let head = format!("{} {}{query} HTTP/1.1\r\ncontent-length: {}\r\n", request.method, url.path(), body.len());
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let host = format!("{}{port}", url.host_str().unwrap_or_default());
    let mut headers = request.headers.clone();
    headers.insert(HOST, HeaderValue::try_from(host).map_err(io::Error::other)?);
    let mut bytes = head.into_bytes();
    for (name, value) in &headers {
        bytes.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    Ok(bytes)
}
