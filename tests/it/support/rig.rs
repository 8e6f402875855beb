//! A server in this process: a real port, two workers or more, a database of its own.

use std::net::SocketAddr;

use actix_idempotency::{Idempotency, PgPool, Policy};
use actix_web::{
    App, FromRequest, Handler, HttpServer, Responder,
    dev::ServerHandle,
    web::{self, Data, ServiceConfig},
};
use reqwest::{Client, Method, RequestBuilder};

use super::{
    PATIENCE,
    app::{self, Misbehaved},
    client::{Raw, client},
    db::Db,
    gate::Gate,
};

pub struct Rig {
    pub db: Db,
    pub pool: PgPool,
    pub idempotency: Idempotency,
    pub gate: Gate,
    pub server: Server,
    pub client: Client,
}

/// A rig under construction.
pub struct Builder {
    policy: Policy,
    pool_size: u32,
    workers: usize,
    on: Option<(Db, Option<PgPool>)>,
}

impl Rig {
    /// The default policy, with anonymous principals allowed, a pool of five and two workers.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    pub async fn with(policy: Policy) -> Self {
        Self::builder().policy(policy).start().await
    }

    pub fn builder() -> Builder {
        Builder { policy: Policy::new().anonymous(), pool_size: 5, workers: 2, on: None }
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(self.server.url(path))
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.server.url(path))
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.server.url(path))
    }

    pub async fn raw(&self) -> Raw {
        Raw::connect(self.server.address).await
    }

    /// The routes of `app.rs` once more, on the same database and gate.
    pub fn twin(&self, policy: Policy) -> Twin {
        self.twin_serving(policy, |config, idempotency, _| app::routes(config, idempotency))
    }

    pub fn twin_serving<F>(&self, policy: Policy, routes: F) -> Twin
    where
        F: Fn(&mut ServiceConfig, &Idempotency, &PgPool) + Clone + Send + 'static,
    {
        Twin::start(self.db.pool(5), policy, self.gate.clone(), routes)
    }

    /// The same with a gate of its own.
    pub fn other(&self, policy: Policy) -> Twin {
        Twin::alone(self.db.pool(5), policy)
    }
}

/// A server that knows no more of the first one than another process would: its engine and its pool
/// are its own.
pub struct Twin {
    pub pool: PgPool,
    pub idempotency: Idempotency,
    pub gate: Gate,
    pub server: Server,
    client: Client,
}

impl Twin {
    /// With the routes of `app.rs`.
    pub fn alone(pool: PgPool, policy: Policy) -> Self {
        Self::start(pool, policy, Gate::new(), |config, idempotency, _| app::routes(config, idempotency))
    }

    fn start<F>(pool: PgPool, policy: Policy, gate: Gate, routes: F) -> Self
    where
        F: Fn(&mut ServiceConfig, &Idempotency, &PgPool) + Clone + Send + 'static,
    {
        let idempotency = Idempotency::postgres(pool.clone()).with(policy);
        let server = Server::start(2, pool.clone(), idempotency.clone(), gate.clone(), routes);
        Self { pool, idempotency, gate, server, client: client() }
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.server.url(path))
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(self.server.url(path))
    }
}

impl Builder {
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    pub fn pool_size(mut self, connections: u32) -> Self {
        self.pool_size = connections;
        self
    }

    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Instead of one of the server that `./with-postgres` names.
    pub fn database(mut self, db: Db) -> Self {
        self.on = Some((db, None));
        self
    }

    /// On this database, by this pool.
    pub fn on(mut self, db: Db, pool: PgPool) -> Self {
        self.on = Some((db, Some(pool)));
        self
    }

    /// With the routes of `app.rs`.
    pub async fn start(self) -> Rig {
        self.serve(|config, idempotency, _| app::routes(config, idempotency)).await
    }

    /// With a handler of the test's own, a POST of `/x`.
    pub async fn handler<H, Args>(self, handler: H) -> Rig
    where
        H: Handler<Args, Output: Responder + 'static> + Send,
        Args: FromRequest + 'static,
    {
        self.serve(move |config, idempotency, _| {
            let route = web::post().to(handler.clone());
            config.service(web::resource("/x").wrap(idempotency.clone()).route(route));
        })
        .await
    }

    /// With routes of the test's own.
    pub async fn serve<F>(self, routes: F) -> Rig
    where
        F: Fn(&mut ServiceConfig, &Idempotency, &PgPool) + Clone + Send + 'static,
    {
        let (db, pool) = match self.on {
            Some(given) => given,
            None => (Db::new().await, None),
        };
        let pool = pool.unwrap_or_else(|| db.pool(self.pool_size));
        let idempotency = Idempotency::postgres(pool.clone()).with(self.policy);
        let gate = Gate::new();
        let server = Server::start(self.workers, pool.clone(), idempotency.clone(), gate.clone(), routes);
        Rig { db, pool, idempotency, gate, server, client: client() }
    }
}

/// A listening server; stopped when dropped, without waiting for anybody.
pub struct Server {
    pub address: SocketAddr,
    pub handle: ServerHandle,
}

impl Server {
    pub fn start<F>(workers: usize, pool: PgPool, idempotency: Idempotency, gate: Gate, routes: F) -> Self
    where
        F: Fn(&mut ServiceConfig, &Idempotency, &PgPool) + Clone + Send + 'static,
    {
        let misbehaved = Misbehaved::default();
        let server = HttpServer::new(move || {
            let (routes, idempotency, pool) = (routes.clone(), idempotency.clone(), pool.clone());
            App::new()
                .app_data(Data::new(pool.clone()))
                .app_data(Data::new(gate.clone()))
                .app_data(Data::new(misbehaved.clone()))
                .configure(move |config| routes(config, &idempotency, &pool))
        })
        .workers(workers)
        .client_request_timeout(PATIENCE)
        .disable_signals()
        .bind(("127.0.0.1", 0))
        .unwrap();
        let address = server.addrs()[0];
        let running = server.run();
        let handle = running.handle();
        actix_web::rt::spawn(running);
        Self { address, handle }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The command is sent when `stop` is called; nobody has to wait for it.
        drop(self.handle.stop(false));
    }
}
