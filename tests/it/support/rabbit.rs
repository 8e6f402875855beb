//! A RabbitMQ of the test's own.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use actix_web::rt::time::sleep;
use lapin::{Connection, ConnectionProperties};

use super::{PATIENCE, cluster::free_port, missing};

/// Where Debian's package keeps the programs that do not change their user.
const BIN: &str = "/usr/lib/rabbitmq/bin";

pub struct Rabbit {
    directory: PathBuf,
    port: u16,
    epmd: u16,
    child: Child,
}

impl Rabbit {
    /// `None` where RabbitMQ is not installed and need not be, or where it is not asked for: it takes a while to
    /// start, and runs with `REPEAT=full` and where `IT_REQUIRE` lists it.
    pub async fn start() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let is_asked_for = env::var("REPEAT").is_ok_and(|value| value == "full")
            || env::var("IT_REQUIRE").is_ok_and(|value| value.contains("rabbitmq-server"));
        if !is_asked_for {
            eprintln!("NOT TESTED: RabbitMQ, without REPEAT=full");
            return None;
        }
        let program = Path::new(BIN).join("rabbitmq-server");
        if !program.is_file() {
            missing("rabbitmq-server");
            return None;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("it-rabbit-{}-{number}", std::process::id());
        let directory = env::temp_dir().join(&name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let (port, epmd) = (free_port(), free_port());
        let child = environment(Command::new(program), &directory, epmd)
            .env("RABBITMQ_NODENAME", format!("{name}@localhost"))
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODE_PORT", port.to_string())
            .env("RABBITMQ_DIST_PORT", free_port().to_string())
            .env("RABBITMQ_MNESIA_BASE", directory.join("data"))
            .env("RABBITMQ_LOG_BASE", &directory)
            .env("RABBITMQ_LOGS", directory.join("log"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", directory.join("plugins"))
            .env("RABBITMQ_CONF_ENV_FILE", directory.join("none"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let rabbit = Self { directory, port, epmd, child };
        // Its machine takes longer to start than anything of ours, beside other tests for minutes.
        let began = Instant::now();
        while Connection::connect(&rabbit.url(), ConnectionProperties::default()).await.is_err() {
            assert!(began.elapsed() < 6 * PATIENCE, "RabbitMQ does not answer");
            sleep(Duration::from_millis(200)).await;
        }
        Some(rabbit)
    }

    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}/%2f", self.port)
    }
}

/// A name server of its own, so that nothing of it remains.
fn environment(mut command: Command, directory: &Path, epmd: u16) -> Command {
    command.env("HOME", directory).env("ERL_EPMD_PORT", epmd.to_string()).current_dir(directory);
    command
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        // What `spawn` started is a shell, which has become the server.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let _ = environment(Command::new("epmd"), &self.directory, self.epmd)
            .arg("-kill")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
