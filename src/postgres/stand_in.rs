//! A connection to nobody.

use std::pin::pin;

use diesel::ConnectionResult;
use futures_util::future::{Either, select};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio_postgres::{Config, NoTls, config::SslMode};

use super::AsyncPgConnection;

/// What a server says to whoever connects, and to what diesel then sets: messages of Postgres' protocol, version 3.
const WELCOME: &[u8] = b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I";
const PARSED: &[u8] = b"1\0\0\0\x04";
const DESCRIBED: &[u8] = b"t\0\0\0\x06\0\0n\0\0\0\x04";
const BOUND: &[u8] = b"2\0\0\0\x04";
const EXECUTED: &[u8] = b"C\0\0\0\x08SET\0";
const CLOSED: &[u8] = b"3\0\0\0\x04";
const READY: &[u8] = b"Z\0\0\0\x05I";

/// A connection that was closed as soon as it was there, made within this process: something to sit in a pool's
/// place while the connection that belongs there is with somebody.
pub(crate) async fn stand_in() -> ConnectionResult<AsyncPgConnection> {
    let (here, there) = duplex(1024);
    let connected = pin!(connect(here));
    match select(connected, pin!(answer(there))).await {
        Either::Left((connected, _)) => connected,
        Either::Right((_, connected)) => connected.await,
    }
}

async fn connect(stream: DuplexStream) -> ConnectionResult<AsyncPgConnection> {
    let mut config = Config::new();
    config.user("nobody").ssl_mode(SslMode::Disable);
    let bad = |error: tokio_postgres::Error| diesel::ConnectionError::BadConnection(error.to_string());
    let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(bad)?;
    match select(pin!(AsyncPgConnection::try_from(client)), connection).await {
        Either::Left((ready, _)) => ready,
        Either::Right((_, ready)) => ready.await,
    }
}

/// The other end, until nobody asks any more.
async fn answer(mut stream: DuplexStream) -> std::io::Result<()> {
    skip(&mut stream).await?;
    stream.write_all(WELCOME).await?;
    loop {
        let kind = stream.read_u8().await?;
        skip(&mut stream).await?;
        let said = match kind {
            b'P' => PARSED,
            b'D' => DESCRIBED,
            b'B' => BOUND,
            b'E' => EXECUTED,
            b'C' => CLOSED,
            b'S' => READY,
            _ => continue,
        };
        stream.write_all(said).await?;
    }
}

/// What stands behind a length, which counts itself.
async fn skip(stream: &mut DuplexStream) -> std::io::Result<()> {
    let length = u64::from(stream.read_u32().await?).saturating_sub(4);
    tokio::io::copy(&mut stream.take(length), &mut tokio::io::sink()).await.map(drop)
}
