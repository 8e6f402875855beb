//! The service as a process of its own: this test binary, executed again, serves instead of testing.

use std::{
    env,
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use actix_idempotency::{Idempotency, Policy, PoolBuilder};
use actix_web::{App, HttpServer, rt::time::sleep, web::Data};

use super::{
    PATIENCE,
    app::{self, Misbehaved},
    gate::Gate,
};

/// How a server process is set up; everything goes through its environment.
#[derive(Clone)]
pub struct Setup {
    pub url: String,
    pub lease: Duration,
    pub retention: Duration,
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
            pool_size: 5,
            workers: 2,
            shutdown_timeout: 30,
            drain: None,
            trusted: None,
        }
    }

    pub fn start(&self) -> ServerProcess {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "support::process::serve_if_asked", "--nocapture"])
            .env("IT_SERVE", &self.url)
            .env("IT_LEASE_MS", self.lease.as_millis().to_string())
            .env("IT_RETENTION_MS", self.retention.as_millis().to_string())
            .env("IT_POOL_SIZE", self.pool_size.to_string())
            .env("IT_WORKERS", self.workers.to_string())
            .env("IT_SHUTDOWN_TIMEOUT", self.shutdown_timeout.to_string())
            .env("IT_DRAIN_MS", self.drain.map(|drain| drain.as_millis().to_string()).unwrap_or_default())
            .envs(self.trusted.iter().map(|file| ("SSL_CERT_FILE", file)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once("listening on ").map(|(_, address)| address.parse().unwrap()))
            .expect("the server process should listen");
        // Whatever else it prints must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        ServerProcess { child, address }
    }
}

pub struct ServerProcess {
    child: Child,
    pub address: SocketAddr,
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
    actix_web::rt::System::new().block_on(async move {
        let size = u32::try_from(number("IT_POOL_SIZE").unwrap()).unwrap();
        let pool = PoolBuilder::new(url).max_size(size.try_into().unwrap()).build().unwrap();
        let policy =
            Policy::new().anonymous().lease(ms("IT_LEASE_MS").unwrap()).retention(ms("IT_RETENTION_MS").unwrap());
        let idempotency = Idempotency::postgres(pool.clone()).with(policy);
        let drained = idempotency.drain();
        let (gate, misbehaved) = (Gate::new(), Misbehaved::default());
        let mut server = HttpServer::new(move || {
            App::new()
                .app_data(Data::new(pool.clone()))
                .app_data(Data::new(gate.clone()))
                .app_data(Data::new(misbehaved.clone()))
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
