//! Clients that cost little: a connection each, requests written by hand, answers read to their length.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{Keys, forms};

/// How many requests were answered with success. Panics at any other answer.
pub async fn load(
    address: SocketAddr,
    method: &'static str,
    path: &'static str,
    keys: Keys,
    clients: usize,
    time: Duration,
) -> usize {
    let until = Instant::now() + time;
    let clients = (0..clients).map(|client| one(address, method, path, keys, client, until));
    futures_util::future::join_all(clients).await.into_iter().sum()
}

async fn one(address: SocketAddr, method: &str, path: &str, keys: Keys, client: usize, until: Instant) -> usize {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let run: u32 = rand::random();
    let mut socket = TcpStream::connect(address).await.expect("a connection");
    socket.set_nodelay(true).expect("no delay");
    let path = path.replace("{client}", &client.to_string());
    let (mut answer, mut answered) = (Vec::with_capacity(4096), 0);
    while Instant::now() < until {
        let key = match keys {
            Keys::None => String::new(),
            Keys::Fresh => format!("idempotency-key: {run:x}-{}\r\n", NEXT.fetch_add(1, Ordering::Relaxed)),
            Keys::Same => format!("idempotency-key: same-{client}\r\n"),
            Keys::Token => format!("form-token: {}\r\n", forms::issue()),
        };
        let body = if method == "POST" { r#"{"product_id":1,"quantity":2}"# } else { "" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer alice\r\n{key}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(request.as_bytes()).await.expect("to send");
        read(&mut socket, &mut answer).await;
        let status = &answer[9..12];
        assert!(status == b"200" || status == b"201", "{path}: {}", String::from_utf8_lossy(&answer));
        answered += 1;
    }
    answered
}

async fn read(socket: &mut TcpStream, answer: &mut Vec<u8>) {
    answer.clear();
    loop {
        assert!(socket.read_buf(answer).await.expect("to receive") > 0, "the server has hung up");
        let Some(head) = memchr::memmem::find(answer, b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
        let length =
            text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0usize);
        if answer.len() >= head + 4 + length {
            return;
        }
    }
}
