//! An example, built and started as its reader does it, in a process of its own; and the shell session that
//! it advises.

use std::{
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use super::missing;

/// Killed when it is dropped.
pub struct Example {
    child: Child,
    /// `http://` and where it listens.
    pub address: String,
    /// What it printed after that.
    pub advice: String,
}

impl Example {
    /// One that prints no more than where it listens.
    pub fn start(name: &str, url: &str) -> Self {
        Self::start_reading(name, url, None)
    }

    /// One that prints advice as well, up to the line that begins with `end`.
    pub fn start_reading(name: &str, url: &str, end: Option<&str>) -> Self {
        let mut child = Command::new(build(name))
            .env("DATABASE_URL", url)
            .env("BIND", "127.0.0.1:0")
            .env_remove("LEASE_SECONDS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let address = lines
            .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned))
            .expect("the example should listen");
        let mut advice = String::new();
        if let Some(end) = end {
            lines.by_ref().take_while(|line| !line.starts_with(end)).for_each(|line| advice += &(line + "\n"));
        }
        // Whatever else it prints must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, advice }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address)
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lines for a shell, of which some are `curl -i`.
pub struct Session(String);

impl Session {
    /// Where there are bash and curl.
    pub fn can_run() -> bool {
        let is_there = |program: &&str| Command::new(program).arg("--version").output().is_ok();
        ["bash", "curl"].iter().all(|program| is_there(program) || !missing(program))
    }

    pub fn of(lines: &str) -> Self {
        Self(lines.to_owned())
    }

    /// Lines that were written for `localhost:8080`.
    pub fn at(example: &Example, lines: &str) -> Self {
        Self(lines.replace("localhost:8080", &example.address))
    }

    /// The statuses of the answers, in their order.
    pub async fn answers(self) -> Vec<u16> {
        let run = move || Command::new("bash").args(["-euc", &self.0]).output().unwrap();
        let shell = actix_web::web::block(run).await.unwrap();
        assert!(shell.status.success(), "{shell:?}");
        let said = String::from_utf8(shell.stdout).unwrap();
        // Bodies do not end their line.
        said.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap()).collect()
    }
}

/// Where cargo has put it. `cargo test` has built it already, `cargo test --test it` has not.
fn build(name: &str) -> PathBuf {
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
