//! The service as a process of its own: this test binary, executed again, serves instead of testing.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    time::Duration,
};

use actix_idempotency::{Idempotency, Inspector, Policy, PoolBuilder};
use actix_web::{
    App, HttpServer,
    rt::time::{sleep, timeout},
    web::Data,
};
use tokio::sync::mpsc;

use super::{
    PATIENCE,
    app::{self, Misbehaved},
    gate::Gate,
    jobs, points, shop,
};

/// How a server process is set up; everything goes through its environment.
#[derive(Clone)]
pub struct Setup {
    pub url: String,
    pub lease: Duration,
    pub retention: Duration,
    /// Of the policy; its own default where there is none.
    pub store_timeout: Option<Duration>,
    pub idle_in_transaction: Option<Duration>,
    pub pool_size: u32,
    pub workers: usize,
    /// Of actix, for connections.
    pub shutdown_timeout: u64,
    /// Of `Drain`; without it actix handles the signals itself.
    pub drain: Option<Duration>,
    /// The certificates that it trusts, instead of the system's.
    pub trusted: Option<PathBuf>,
}

impl Setup {
    pub fn new(url: &str) -> Self {
        Self {
            url: url.into(),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(3600),
            store_timeout: None,
            idle_in_transaction: None,
            pool_size: 5,
            workers: 2,
            shutdown_timeout: 30,
            drain: None,
            trusted: None,
        }
    }

    pub fn start(&self) -> ServerProcess {
        let ms = |duration: Option<Duration>| duration.map(|it| it.as_millis().to_string()).unwrap_or_default();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "support::process::serve_if_asked", "--nocapture"])
            .env("IT_SERVE", &self.url)
            .env("IT_LEASE_MS", self.lease.as_millis().to_string())
            .env("IT_RETENTION_MS", self.retention.as_millis().to_string())
            .env("IT_STORE_TIMEOUT_MS", ms(self.store_timeout))
            .env("IT_IDLE_IN_TRANSACTION_MS", ms(self.idle_in_transaction))
            .env("IT_POOL_SIZE", self.pool_size.to_string())
            .env("IT_WORKERS", self.workers.to_string())
            .env("IT_SHUTDOWN_TIMEOUT", self.shutdown_timeout.to_string())
            .env("IT_DRAIN_MS", ms(self.drain))
            .envs(self.trusted.iter().map(|file| ("SSL_CERT_FILE", file)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once("listening on ").map(|(_, address)| address.parse().unwrap()))
            .expect("the server process should listen");
        let (said, points) = mpsc::unbounded_channel();
        // Whatever else it prints must not fill the pipe.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, point)) = line.split_once(points::PREFIX) {
                    let _ = said.send(point.to_owned());
                }
            }
        });
        let orders = child.stdin.take().unwrap();
        ServerProcess { child, address, orders, points }
    }
}

pub struct ServerProcess {
    child: Child,
    pub address: SocketAddr,
    orders: ChildStdin,
    points: mpsc::UnboundedReceiver<String>,
}

impl ServerProcess {
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and gone when this returns.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// `TERM`, `STOP`, `CONT`, ...
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.id().to_string()).status().unwrap();
        assert!(status.success());
    }

    /// The nth thread that comes to this point of the path from now on stays there, see `points.rs`.
    pub async fn stop_at(&mut self, point: &str, nth: u32) {
        writeln!(self.orders, "stop {point} {nth}").unwrap();
        self.stopped_at("understood").await;
    }

    /// Until it has come to the point where it stops.
    pub async fn stopped_at(&mut self, point: &str) {
        let said = timeout(PATIENCE, self.points.recv()).await.ok().flatten();
        assert_eq!(said.as_deref(), Some(point), "the server process should come here");
    }

    /// From the point where it has stopped.
    pub fn go_on(&mut self) {
        writeln!(self.orders, "go").unwrap();
    }

    pub async fn exited(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process. Among the tests it finds no IT_SERVE and is done.
#[test]
fn serve_if_asked() {
    let Ok(url) = env::var("IT_SERVE") else { return };
    let number = |name: &str| env::var(name).unwrap().parse::<u64>().ok();
    let ms = |name: &str| number(name).map(Duration::from_millis);
    let drain = ms("IT_DRAIN_MS");
    points::obey();
    actix_web::rt::System::new().block_on(async move {
        let size = u32::try_from(number("IT_POOL_SIZE").unwrap()).unwrap();
        let pool = PoolBuilder::new(url).max_size(size.try_into().unwrap()).build().unwrap();
        let mut policy =
            Policy::new().anonymous().lease(ms("IT_LEASE_MS").unwrap()).retention(ms("IT_RETENTION_MS").unwrap());
        if let Some(timeout) = ms("IT_STORE_TIMEOUT_MS") {
            policy = policy.store_timeout(timeout);
        }
        if let Some(timeout) = ms("IT_IDLE_IN_TRANSACTION_MS") {
            policy = policy.idle_in_transaction(timeout);
        }
        let idempotency = Idempotency::postgres(pool.clone()).with(policy.clone());
        let drained = idempotency.drain();
        let (gate, misbehaved) = (Gate::new(), Misbehaved::default());
        let mut server = HttpServer::new(move || {
            App::new()
                .app_data(Data::new(pool.clone()))
                .app_data(Data::new(gate.clone()))
                .app_data(Data::new(misbehaved.clone()))
                .service(Inspector::new(&idempotency).protected_elsewhere().scope("/idempotency"))
                .configure(|config| jobs::routes(config, &idempotency, &policy))
                .configure(|config| shop::routes(config, &idempotency, &policy))
                .configure(|config| app::routes(config, &idempotency))
        })
        .workers(number("IT_WORKERS").unwrap().try_into().unwrap())
        .client_request_timeout(PATIENCE)
        .shutdown_timeout(number("IT_SHUTDOWN_TIMEOUT").unwrap());
        if let Some(deadline) = drain {
            server = server.shutdown_signal(drained.deadline(deadline));
        }
        let server = server.bind(("127.0.0.1", 0)).unwrap();
        println!("listening on {}", server.addrs()[0]);
        server.run().await.unwrap();
    });
}
