//! A pool that suits this crate.

mod watched;

use std::{future::ready, num::NonZeroU32, sync::Arc, time::Duration};

use diesel::{ConnectionError, ConnectionResult, result::Error as QueryError};
use diesel_async::{
    AsyncPgConnection,
    pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, PoolableConnection, RecyclingMethod},
};
use futures_util::FutureExt;
use tokio_postgres::{
    Config, NoTls,
    config::{Host, SslMode, SslNegotiation, TargetSessionAttrs},
};

use crate::{
    engine::background,
    error::{Error, ErrorKind},
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::{
        PgPool,
        witness::{self, Seen},
    },
};

use watched::{Plain, Watched};

/// How many connections a pool has at most: ten, bb8's own default.
pub const DEFAULT_POOL_SIZE: u32 = 10;

/// A pool of at most [`DEFAULT_POOL_SIZE`] connections to `url`
/// (`postgres://user:password@host/database?sslmode=require` or `host=… user=…`). Connections open
/// when they are needed. See [`PoolBuilder`].
///
/// # Errors
///
/// [`ErrorKind::Configuration`] where the string cannot be parsed, or asks for TLS and the crate's
/// `rustls` feature is off.
///
/// ```
/// # async fn example() -> Result<(), actix_idempotency::Error> {
/// let pool = actix_idempotency::pool("postgres://localhost/shop")?;
/// # Ok(())
/// # }
/// ```
pub fn pool(url: &str) -> Result<PgPool, Error> {
    PoolBuilder::new(url).build()
}

/// How a pool is made. Three things are not bb8's defaults:
///
/// - **No test at checkout.** A `SELECT 1` before every use costs a round trip for each. A dead
///   connection is recognised when it is taken (its socket is closed) or by the first statement, and
///   a claim may be sent again.
/// - **One thread drives all connections.** Otherwise each is driven by the worker that happened to
///   open it, and a handler that blocks that worker stalls the others' statements.
/// - **What the server says of a failure is read along.** A transaction that another one has beaten (40001, 40P01) is
///   answered 409 `serialization`, whatever a handler makes of the error. The driver tells no code, so these
///   connections listen to the server themselves; they cannot be cancelled by a `cancel_token` for that, and
///   `pg_cancel_backend` does it.
///
/// Any other pool of the type [`PgPool`] does as well, without these.
#[derive(Debug)]
pub struct PoolBuilder {
    url: Url,
    size: NonZeroU32,
    timeout: Duration,
}

/// The connection string, which may hold a password.
struct Url(String);

impl std::fmt::Debug for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl PoolBuilder {
    /// A pool for `url`, with the defaults.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: Url(url.into()),
            size: NonZeroU32::new(DEFAULT_POOL_SIZE).unwrap_or(NonZeroU32::MIN),
            timeout: DEFAULT_STORE_TIMEOUT,
        }
    }

    /// How many connections at most. Default: [`DEFAULT_POOL_SIZE`]. One is enough to work.
    #[must_use]
    pub fn max_size(mut self, connections: NonZeroU32) -> Self {
        self.size = connections;
        self
    }

    /// How long to wait for a free connection. Default: 5 s, as for every statement of this crate.
    ///
    /// # Panics
    ///
    /// For zero.
    #[track_caller]
    #[must_use]
    pub fn connection_timeout(mut self, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "PoolBuilder::connection_timeout: must not be zero");
        self.timeout = timeout;
        self
    }

    /// The pool. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// As [`pool`].
    pub fn build(self) -> Result<PgPool, Error> {
        let Url(url) = self.url;
        parse(&url)?;
        let mut config = ManagerConfig::default();
        // Looks, and asks nobody: the socket may be closed.
        config.recycling_method = RecyclingMethod::CustomFunction(Box::new(|conn: &mut AsyncPgConnection| {
            let alive = if conn.is_broken() { Err(QueryError::BrokenTransactionManager) } else { Ok(()) };
            ready(alive).boxed()
        }));
        config.custom_setup = Box::new(|url| {
            let url = url.to_owned();
            let connecting = background::handle().spawn(async move { connect(&url).await });
            async { connecting.await.map_err(|error| ConnectionError::BadConnection(error.to_string()))? }.boxed()
        });
        Ok(PgPool::builder()
            .max_size(self.size.get())
            .connection_timeout(self.timeout)
            .test_on_check_out(true)
            .build_unchecked(AsyncDieselConnectionManager::new_with_config(url, config)))
    }
}

/// A connection that is driven by the runtime this is called on, and read along.
pub(crate) async fn connect(url: &str) -> ConnectionResult<AsyncPgConnection> {
    let config = url.parse::<Config>().map_err(|error| ConnectionError::InvalidConnectionUrl(error.to_string()))?;
    let seen = Arc::default();
    #[cfg(unix)]
    if let ([Host::Unix(directory)], TargetSessionAttrs::Any) = (config.get_hosts(), config.get_target_session_attrs())
    {
        let conn = connect_to_socket(&config, directory, &seen).await?;
        return Ok(witness::attach(conn, seen));
    }
    #[cfg(feature = "rustls")]
    if config.get_ssl_mode() != SslMode::Disable {
        let tls = tls::connector().map_err(|error| ConnectionError::BadConnection(error.to_string()))?;
        let mut required = config.clone();
        required.ssl_mode(SslMode::Require);
        match required.connect(watched::Encrypted(tls, Arc::clone(&seen))).await {
            Ok((client, connection)) => {
                let conn = AsyncPgConnection::try_from_client_and_connection(client, connection).await?;
                return Ok(witness::attach(conn, seen));
            }
            // The default: without TLS rather than not at all, as libpq has it.
            Err(error) if config.get_ssl_mode() == SslMode::Prefer && error.as_db_error().is_none() => {}
            Err(error) => return Err(bad(&error)),
        }
    }
    connect_plainly(config, seen).await
}

/// Without TLS. The driver is told to begin with it at once, and what begins is only the reading along; for that
/// it wants a name of the host, and an address is one. Among several hosts a socket of Unix has none, and nobody reads
/// along.
async fn connect_plainly(mut config: Config, seen: Arc<Seen>) -> ConnectionResult<AsyncPgConnection> {
    if config.get_hosts().is_empty() {
        let addresses: Vec<_> = config.get_hostaddrs().iter().map(ToString::to_string).collect();
        for address in addresses {
            config.host(address);
        }
    }
    if config.get_hosts().iter().any(|host| !matches!(host, Host::Tcp(_))) {
        let (client, connection) = config.connect(NoTls).await.map_err(|error| bad(&error))?;
        return AsyncPgConnection::try_from_client_and_connection(client, connection).await;
    }
    config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
    let (client, connection) = config.connect(Plain(Arc::clone(&seen))).await.map_err(|error| bad(&error))?;
    let conn = AsyncPgConnection::try_from_client_and_connection(client, connection).await?;
    Ok(witness::attach(conn, seen))
}

/// Where a socket of Unix has no name of a host, it can be opened without the driver.
#[cfg(unix)]
async fn connect_to_socket(
    config: &Config,
    directory: &std::path::Path,
    seen: &Arc<Seen>,
) -> ConnectionResult<AsyncPgConnection> {
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let connecting = async {
        let socket = tokio::net::UnixStream::connect(directory.join(format!(".s.PGSQL.{port}"))).await;
        let socket = socket.map_err(|error| ConnectionError::BadConnection(error.to_string()))?;
        config.connect_raw(Watched::plain(socket, seen), NoTls).await.map_err(|error| bad(&error))
    };
    let patience = config.get_connect_timeout().copied().unwrap_or(DEFAULT_STORE_TIMEOUT);
    let (client, connection) = tokio::time::timeout(patience, connecting)
        .await
        .map_err(|_| ConnectionError::BadConnection("the server did not answer in time".into()))??;
    tokio::spawn(connection);
    AsyncPgConnection::try_from(client).await
}

fn bad(error: &tokio_postgres::Error) -> ConnectionError {
    ConnectionError::BadConnection(chain(error))
}

/// tokio-postgres says "error connecting to server" and leaves the reason to its source.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}

/// Fails for what can be known without connecting. The message does not quote the string.
pub(crate) fn parse(url: &str) -> Result<Config, Error> {
    let config = url
        .parse::<Config>()
        .map_err(|error| Error::new(ErrorKind::Configuration, "the connection string cannot be used").because(error))?;
    if cfg!(not(feature = "rustls")) && config.get_ssl_mode() == SslMode::Require {
        return Err(Error::new(
            ErrorKind::Configuration,
            "sslmode=require needs the feature `rustls` of actix-idempotency, or a pool of your own that speaks TLS",
        ));
    }
    Ok(config)
}

#[cfg(feature = "rustls")]
mod tls {
    use std::{io, sync::Arc};

    use rustls::{ClientConfig, RootCertStore, crypto::ring};
    use tokio_postgres_rustls::MakeRustlsConnect;

    /// Checks the server's certificate against those that the system trusts (`SSL_CERT_FILE` and
    /// `SSL_CERT_DIR` name others). Stricter than libpq's `sslmode=require`, which checks nothing.
    pub(super) fn connector() -> io::Result<MakeRustlsConnect> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(MakeRustlsConnect::new(config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_string_is_refused_without_being_quoted() {
        let error = pool("postgres://alice:hunter2@localhost/shop?sslmode=sometimes").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        assert!(!format!("{:?}", PoolBuilder::new("postgres://alice:hunter2@localhost")).contains("hunter2"));
    }

    #[cfg(not(feature = "rustls"))]
    #[test]
    fn tls_without_the_feature_is_refused_by_name() {
        let error = pool("postgres://localhost/shop?sslmode=require").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        assert!(error.to_string().contains("`rustls`"), "{error}");
    }
}
