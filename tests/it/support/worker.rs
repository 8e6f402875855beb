//! A process of its own that serves no requests: this test binary, executed again with one of its tests that
//! works instead of testing.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
};

use actix_web::rt::time::timeout;
use tokio::sync::mpsc;

use super::{PATIENCE, points};

pub struct Worker {
    child: Child,
    orders: ChildStdin,
    points: mpsc::UnboundedReceiver<String>,
}

impl Worker {
    /// `work` is the path of a test that begins with [`points::obey`] where its environment asks for work.
    pub fn start(work: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", work, "--nocapture"])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
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
        Self { child, orders, points }
    }

    /// It will stay where it comes to this point for the nth time.
    pub async fn stop_at(&mut self, point: &str, nth: u32) {
        writeln!(self.orders, "stop {point} {nth}").unwrap();
        self.stopped_at("understood").await;
    }

    pub async fn stopped_at(&mut self, point: &str) {
        let said = timeout(PATIENCE, self.points.recv()).await.ok().flatten();
        assert_eq!(said.as_deref(), Some(point), "the worker should come here");
    }

    /// SIGKILL, and gone when this returns.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
