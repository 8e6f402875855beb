//! A PgBouncer in front of a server.

use std::{
    env, fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use super::{PATIENCE, db::with_database, missing};

pub struct Bouncer {
    directory: PathBuf,
    port: u16,
    child: Child,
}

impl Bouncer {
    /// In front of the server of `url`, with `pool_mode` as given and room for twenty server connections;
    /// `None` where PgBouncer is not installed and need not be.
    pub fn start(url: &str, pool_mode: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let Some(program) = program() else {
            missing("pgbouncer");
            return None;
        };
        let directory =
            env::temp_dir().join(format!("it-bouncer-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let server: tokio_postgres::Config = url.parse().unwrap();
        let host = match &server.get_hosts()[0] {
            tokio_postgres::config::Host::Tcp(host) => host.clone(),
            tokio_postgres::config::Host::Unix(path) => path.display().to_string(),
        };
        let user = server.get_user().unwrap_or("postgres");
        let password = server
            .get_password()
            .map_or(String::new(), |password| format!(" password={}", String::from_utf8(password.to_vec()).unwrap()));
        let server_port = server.get_ports().first().unwrap_or(&5432);
        let ini = directory.join("pgbouncer.ini");
        fs::write(
            &ini,
            format!(
                "[databases]\n* = host={host} port={server_port} user={user}{password}\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
                 pool_mode = {pool_mode}\ndefault_pool_size = 20\n"
            ),
        )
        .unwrap();
        let os_user = env::var("POSTGRES_OS_USER").unwrap_or_default();
        let mut command = if os_user.is_empty() {
            Command::new(&program)
        } else {
            let mut command = Command::new("runuser");
            command.args(["-u", &os_user, "--"]).arg(&program);
            command
        };
        let child = command
            .arg(&ini)
            .current_dir(&directory)
            .stdout(Stdio::null())
            .stderr(fs::File::create(directory.join("log")).unwrap())
            .spawn()
            .unwrap();
        let bouncer = Self { directory, port, child };
        bouncer.wait_until_it_listens();
        Some(bouncer)
    }

    /// The URL of this database of the server, through the bouncer.
    pub fn url(&self, database: &str) -> String {
        with_database(&format!("postgres://postgres@127.0.0.1:{}/postgres", self.port), database)
    }

    fn wait_until_it_listens(&self) {
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let log = || fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            assert!(began.elapsed() < PATIENCE, "PgBouncer does not listen: {}", log());
            sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        // What `kill` reaches may be runuser, which passes SIGTERM on.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Debian keeps it where only root's PATH leads.
fn program() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"].map(PathBuf::from))
        .map(|directory| directory.join("pgbouncer"))
        .find(|program| Path::is_file(program))
}
