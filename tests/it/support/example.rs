//! An example, built and started as its reader does it, in a process of its own; and the shell session that
//! it advises.

use std::{
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

use super::{PATIENCE, eventually, missing};

/// Killed when it is dropped.
pub struct Example {
    child: Child,
    /// `http://` and where it listens.
    pub address: String,
    said: mpsc::Receiver<String>,
    log: Arc<Mutex<String>>,
}

impl Example {
    pub fn start(name: &str, url: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(build(name))
            .env_remove("LEASE_SECONDS")
            .env("DATABASE_URL", url)
            .env("BIND", "127.0.0.1:0")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let address = lines
            .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned))
            .expect("the example should listen");
        let (says, said) = mpsc::channel();
        // Nobody may listen, but what it prints must not fill the pipe.
        let log = Arc::<Mutex<String>>::default();
        let logs = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines {
                *logs.lock().unwrap_or_else(PoisonError::into_inner) += &line;
                says.send(line).unwrap_or_default();
            }
        });
        Self { child, address, said, log }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address)
    }

    /// What it prints until a line begins so.
    pub fn advice(&self, end: &str) -> String {
        let mut advice = String::new();
        loop {
            let line = self.said.recv_timeout(PATIENCE).expect("the example should say more");
            if line.starts_with(end) {
                return advice;
            }
            advice += &(line + "\n");
        }
    }

    /// How often these words have been printed since it listens.
    pub fn has_said(&self, words: &str) -> usize {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).matches(words).count()
    }

    /// SIGKILL, and gone when this returns.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Where cargo has put it. `cargo test` has built it already, `cargo test --test it` has not.
pub fn build(name: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let built = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--message-format=json", "--example", name])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    String::from_utf8(built.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|artifact| artifact["target"]["name"] == name)
        .find_map(|artifact| artifact["executable"].as_str().map(PathBuf::from))
        .expect("cargo should say where it is")
}

/// Lines for a shell, of which some are `curl -i`.
pub struct Session(String);

/// Said where a reader would wait a second for the request before to have begun.
const WAITING: &str = "waiting";

impl Session {
    /// Where there are bash and curl.
    pub fn can_run() -> bool {
        let is_there = |program: &&str| Command::new(program).arg("--version").output().is_ok();
        ["bash", "curl"].iter().all(|program| is_there(program) || !missing(program))
    }

    pub fn of(lines: &str) -> Self {
        Self(lines.replace("sleep 1;", &format!("echo; echo {WAITING}; read -r;")))
    }

    /// Lines that were written for `localhost:8080`.
    pub fn at(example: &Example, lines: &str) -> Self {
        Self::of(&lines.replace("localhost:8080", &example.address))
    }

    /// The statuses of the answers, in their order. The closure tells whether a request has begun.
    pub async fn answers(self, has_begun: impl AsyncFn() -> bool) -> Vec<u16> {
        let mut shell = tokio::process::Command::new("bash")
            .args(["-euc", &self.0])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdin = shell.stdin.take().unwrap();
        let mut lines = tokio::io::BufReader::new(shell.stdout.take().unwrap()).lines();
        let mut said = String::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            if line == WAITING {
                eventually("the request before has begun", async || has_begun().await).await;
                stdin.write_all(b"\n").await.unwrap();
            }
            said += &(line + "\n");
        }
        let status = shell.wait().await.unwrap();
        assert!(status.success(), "{status}: {said}");
        // A body need not end its line.
        said.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap()).collect()
    }
}
