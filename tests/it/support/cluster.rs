//! A Postgres server of the test's own, from the binaries that `./with-postgres` found.

use std::{
    env, fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

pub struct Cluster {
    directory: PathBuf,
    port: u16,
    bin: PathBuf,
    user: String,
    language: String,
}

/// Those that a server of Debian's speaks.
pub const LANGUAGES: [&str; 12] = ["en", "de", "es", "fr", "it", "ja", "ka", "ko", "ru", "sv", "uk", "zh_CN"];

impl Cluster {
    /// A server with these settings on top of its defaults, `name = value` each.
    pub fn start(settings: &[&str]) -> Self {
        Self::speaking("en", settings)
    }

    /// One that says what it has to say in this language, where it can.
    pub fn speaking(language: &str, settings: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let bin = env::var("POSTGRES_BIN").expect("POSTGRES_BIN is not set: run the tests by ./with-postgres");
        let user = env::var("POSTGRES_OS_USER").unwrap_or_default();
        let directory =
            env::temp_dir().join(format!("it-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let port = free_port();
        let language = language.to_owned();
        let cluster = Self { directory, port, bin: bin.into(), user, language };
        if !cluster.user.is_empty() {
            succeed(Command::new("chown").arg(&cluster.user).arg(&cluster.directory));
        }
        let data = cluster.data();
        cluster.run("initdb", &["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync", "-D", &data]);
        let mut conf = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{}'\nmax_connections = 200\nlc_messages = 'C.UTF-8'\n",
            cluster.directory.display()
        );
        settings.iter().for_each(|setting| conf.push_str(&format!("{setting}\n")));
        let path = Path::new(&data).join("postgresql.conf");
        let before = fs::read_to_string(&path).unwrap();
        fs::write(path, before + &conf).unwrap();
        cluster.up();
        cluster
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn up(&self) {
        let log = self.directory.join("log").display().to_string();
        self.run("pg_ctl", &["start", "--wait", "--silent", "-D", &self.data(), "-l", &log]);
    }

    /// The same through its Unix socket.
    pub fn socket_url(&self) -> String {
        format!("host={} port={} user=postgres dbname=postgres", self.directory.display(), self.port)
    }

    /// From now on in another language.
    pub fn speak(&mut self, language: &str) {
        self.down();
        self.language = language.to_owned();
        self.up();
    }

    /// As a crash: no checkpoint, every connection cut.
    pub fn down(&self) {
        self.run("pg_ctl", &["stop", "--wait", "--silent", "--mode=immediate", "-D", &self.data()]);
    }

    /// From now on a replica (of nobody), with the data that it has.
    pub fn become_standby(&self) {
        self.run("pg_ctl", &["stop", "--wait", "--silent", "--mode=fast", "-D", &self.data()]);
        fs::write(Path::new(&self.data()).join("standby.signal"), "").unwrap();
        self.up();
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap()
    }

    fn data(&self) -> String {
        self.directory.join("data").display().to_string()
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let program = self.bin.join(program);
        let mut command = if self.user.is_empty() {
            Command::new(program)
        } else {
            let mut command = Command::new("runuser");
            // `--` ends runuser's own options.
            command.args(["-u", &self.user, "--"]).arg(program);
            command
        };
        // What gettext asks first, and needs no locale of the system for.
        succeed(command.args(arguments).env("LANGUAGE", &self.language));
    }
}

/// Below the ports that systems give to outgoing connections, so that nobody takes it while the server is down.
pub fn free_port() -> u16 {
    loop {
        let port = rand::random_range(20_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let data = self.data();
        let stop = ["stop", "--wait", "--silent", "--mode=immediate", "-D", &data];
        let program = self.bin.join("pg_ctl");
        let _ = if self.user.is_empty() {
            Command::new(program).args(stop).output()
        } else {
            Command::new("runuser").args(["-u", &self.user, "--"]).arg(program).args(stop).output()
        };
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[track_caller]
fn succeed(command: &mut Command) -> Output {
    let output = command.current_dir(env::temp_dir()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}
