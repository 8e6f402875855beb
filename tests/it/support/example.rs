//! An example, built and started as its reader does it, in a process of its own.

use std::{
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
};

/// Killed when it is dropped.
pub struct Example {
    child: Child,
    /// `http://` and where it listens.
    pub address: String,
    /// What it printed after that, until an empty line follows this one.
    pub advice: String,
}

impl Example {
    /// `last` begins the paragraph that ends what it prints at its start.
    pub fn start(name: &str, url: &str, last: &str) -> Self {
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
        let advice = lines
            .by_ref()
            .take_while(|line| !line.starts_with(last))
            .fold(String::new(), |all, line| all + &line + "\n");
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
