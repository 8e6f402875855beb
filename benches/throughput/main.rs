//! What protection costs: requests per second and CPU per request, side by side in one run.
//!
//!     ./with-postgres cargo bench
//!     ./with-postgres cargo bench -- --clients 1,8,32 --seconds 2 --rounds 5 --only SELECT,replay
//!
//! A server process with two workers and a pool of ten, Postgres, and this process as the clients share the
//! machine. Within a round every row runs once, so that a noisy minute hits all of them; the figures are
//! medians over the rounds, and the ratios are taken within each round before their median is.

mod by_hand;
mod client;
mod cpu;
mod forms;
mod inbox;
mod once;
mod rows;
mod server;

use std::{
    collections::HashMap,
    env,
    process::{Child, Command},
    time::Duration,
};

use diesel::{QueryableByName, sql_types::BigInt};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

/// A row, and the one that it is compared with. `{client}` in a path is the number of the client.
struct Row {
    name: &'static str,
    path: &'static str,
    method: &'static str,
    keys: Keys,
    against: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Keys {
    None,
    Fresh,
    /// One for each client, whose answer is there already.
    Same,
    /// A form token for each request.
    Token,
}

#[rustfmt::skip]
const ROWS: &[Row] = &[
    Row { name: "GET, bare", path: "/bare/hello", method: "GET", keys: Keys::None, against: None },
    Row { name: "GET, passed through", path: "/wrapped/hello", method: "GET", keys: Keys::None, against: Some("GET, bare") },
    Row { name: "SELECT by primary key", path: "/bare/select", method: "GET", keys: Keys::None, against: None },
    Row { name: "POST answered by SELECT", path: "/bare/select", method: "POST", keys: Keys::Same, against: Some("SELECT by primary key") },
    Row { name: "replay", path: "/wrapped/order", method: "POST", keys: Keys::Same, against: Some("SELECT by primary key") },
    Row { name: "replay: against POST", path: "/wrapped/order", method: "POST", keys: Keys::Same, against: Some("POST answered by SELECT") },
    Row { name: "order, bare", path: "/bare/order", method: "POST", keys: Keys::None, against: None },
    Row { name: "claim, order, complete by hand", path: "/bare/order-by-hand", method: "POST", keys: Keys::Fresh, against: Some("order, bare") },
    Row { name: "order, fresh key", path: "/wrapped/order", method: "POST", keys: Keys::Fresh, against: Some("claim, order, complete by hand") },
    Row { name: "order in a transaction", path: "/bare/order-tx", method: "POST", keys: Keys::None, against: None },
    Row { name: "default by hand", path: "/bare/default-by-hand", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "IdemTx, default policy", path: "/wrapped/order-idemtx", method: "POST", keys: Keys::Fresh, against: Some("default by hand") },
    Row { name: "atomic by hand", path: "/bare/atomic-by-hand", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "IdemTx, atomic", path: "/atomic/order-idemtx", method: "POST", keys: Keys::Fresh, against: Some("atomic by hand") },
    Row { name: "IdemTx, atomic: against unprotected", path: "/atomic/order-idemtx", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "Once::run", path: "/bare/once", method: "POST", keys: Keys::Fresh, against: Some("order, bare") },
    Row { name: "Once::run_in", path: "/bare/once-in-tx", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "IdemTx, atomic: driven by each worker", path: "/workers/order-idemtx", method: "POST", keys: Keys::Fresh, against: Some("IdemTx, atomic") },
    Row { name: "update by hand in diesel", path: "/bare/update-by-hand/{client}", method: "PUT", keys: Keys::None, against: None },
    Row { name: "update, versioned", path: "/bare/update-versioned/{client}", method: "PUT", keys: Keys::None, against: Some("update by hand in diesel") },
    Row { name: "update by hand, prepared once", path: "/bare/update-prepared/{client}", method: "PUT", keys: Keys::None, against: None },
    Row { name: "update, versioned: against prepared", path: "/bare/update-versioned/{client}", method: "PUT", keys: Keys::None, against: Some("update by hand, prepared once") },
    Row { name: "update 1 row, FOR UPDATE", path: "/bare/rows-locked/1", method: "PUT", keys: Keys::None, against: None },
    Row { name: "update 1 row, versioned", path: "/bare/rows-versioned/1", method: "PUT", keys: Keys::None, against: Some("update 1 row, FOR UPDATE") },
    Row { name: "update 1 row, guarded", path: "/bare/rows-guarded/1", method: "PUT", keys: Keys::None, against: Some("update 1 row, FOR UPDATE") },
    Row { name: "update 100 rows, FOR UPDATE", path: "/bare/rows-locked/100", method: "PUT", keys: Keys::None, against: None },
    Row { name: "update 100 rows, versioned", path: "/bare/rows-versioned/100", method: "PUT", keys: Keys::None, against: Some("update 100 rows, FOR UPDATE") },
    Row { name: "update 100 rows, guarded", path: "/bare/rows-guarded/100", method: "PUT", keys: Keys::None, against: Some("update 100 rows, FOR UPDATE") },
    Row { name: "update 100,000 rows, FOR UPDATE", path: "/bare/rows-locked/100000", method: "PUT", keys: Keys::None, against: None },
    Row { name: "update 100,000 rows, versioned", path: "/bare/rows-versioned/100000", method: "PUT", keys: Keys::None, against: Some("update 100,000 rows, FOR UPDATE") },
    Row { name: "update 100,000 rows, guarded", path: "/bare/rows-guarded/100000", method: "PUT", keys: Keys::None, against: Some("update 100,000 rows, FOR UPDATE") },
    Row { name: "inbox: receive, order", path: "/inbox/receive", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "inbox: handle, order", path: "/inbox/handle", method: "POST", keys: Keys::Fresh, against: Some("order in a transaction") },
    Row { name: "form token, issued", path: "/form/token", method: "GET", keys: Keys::None, against: Some("GET, bare") },
    Row { name: "form token, submitted", path: "/form/order", method: "POST", keys: Keys::Token, against: Some("IdemTx, atomic") },
];

struct Options {
    clients: Vec<usize>,
    time: Duration,
    rounds: usize,
    only: String,
}

impl Options {
    fn from_arguments() -> Self {
        let mut options =
            Self { clients: vec![1, 8, 32], time: Duration::from_millis(1500), rounds: 5, only: String::new() };
        let mut arguments = env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("a value");
            match argument.as_str() {
                "--clients" => options.clients = value().split(',').map(|n| n.parse().expect("a number")).collect(),
                "--seconds" => options.time = Duration::from_secs_f64(value().parse().expect("seconds")),
                "--rounds" => options.rounds = value().parse().expect("a number"),
                "--only" => options.only = value(),
                _ => {} // what cargo adds
            }
        }
        options
    }
}

/// What one run of a row has measured, per request.
#[derive(Clone, Copy, Default)]
struct Sample {
    per_second: f64,
    server_us: f64,
    postgres_us: f64,
    wal_bytes: f64,
    flushes: f64,
}

fn main() {
    if let Ok(url) = env::var("BENCH_SERVE") {
        return server::serve(&url);
    }
    let url = env::var("DATABASE_URL").expect("DATABASE_URL is not set: run this by ./with-postgres cargo bench");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(&url, &Options::from_arguments()));
}

async fn run(url: &str, options: &Options) {
    server::prepare(url).await;
    let mut server = Stopped(
        Command::new(env::current_exe().expect("this program"))
            .env("BENCH_SERVE", url)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a server process"),
    );
    let address = server::address_of(&mut server.0);
    let mut database = AsyncPgConnection::establish(url).await.expect("a connection");
    let rows: Vec<&Row> =
        ROWS.iter().filter(|row| options.only.split(',').any(|part| row.name.contains(part))).collect();
    for &clients in &options.clients {
        let mut samples: HashMap<&str, Vec<Sample>> = HashMap::new();
        // The first round warms up and does not count.
        for round in 0..=options.rounds {
            for row in &rows {
                let sample = measure(row, clients, options.time, address, server.0.id(), &mut database).await;
                if round > 0 {
                    samples.entry(row.name).or_default().push(sample);
                }
            }
        }
        report(clients, &rows, &samples);
    }
}

/// Killed when it is dropped, by a panic too.
struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn measure(
    row: &Row,
    clients: usize,
    time: Duration,
    address: std::net::SocketAddr,
    server: u32,
    database: &mut AsyncPgConnection,
) -> Sample {
    let before = (cpu::of_process(server), cpu::of_postgres(), wal(database).await);
    let requests = client::load(address, row.method, row.path, row.keys, clients, time).await as f64;
    let after = (cpu::of_process(server), cpu::of_postgres(), wal(database).await);
    Sample {
        per_second: requests / time.as_secs_f64(),
        server_us: after.0.saturating_sub(before.0).as_micros() as f64 / requests,
        postgres_us: after.1.saturating_sub(before.1).as_micros() as f64 / requests,
        wal_bytes: (after.2.0 - before.2.0) as f64 / requests,
        flushes: (after.2.1 - before.2.1) as f64 / requests,
    }
}

async fn wal(database: &mut AsyncPgConnection) -> (i64, i64) {
    #[derive(QueryableByName)]
    struct Wal {
        #[diesel(sql_type = BigInt)]
        bytes: i64,
        #[diesel(sql_type = BigInt)]
        flushes: i64,
    }
    let wal: Result<Wal, _> =
        diesel::sql_query("SELECT wal_bytes::bigint AS bytes, wal_sync AS flushes FROM pg_stat_wal")
            .get_result(database)
            .await;
    // Before Postgres 14 and from 18 on these columns are elsewhere.
    wal.map_or((0, 0), |wal| (wal.bytes, wal.flushes))
}

fn report(clients: usize, rows: &[&Row], samples: &HashMap<&str, Vec<Sample>>) {
    println!("\n{clients} client{}", if clients == 1 { "" } else { "s" });
    println!("| row | requests/s | of | server µs | Postgres µs | WAL bytes | flushes |");
    println!("|---|---|---|---|---|---|---|");
    for row in rows {
        let these = &samples[row.name];
        let ratio = row.against.and_then(|against| Some((against, samples.get(against)?))).map(|(against, those)| {
            let ratios = these.iter().zip(those).map(|(this, that)| this.per_second / that.per_second);
            format!("{:.2} of {against}", median(ratios))
        });
        let of = |figure: fn(&Sample) -> f64| median(these.iter().map(figure));
        println!(
            "| {} | {:.0} | {} | {:.0} | {:.0} | {:.0} | {:.2} |",
            row.name,
            of(|s| s.per_second),
            ratio.unwrap_or_default(),
            of(|s| s.server_us),
            of(|s| s.postgres_us),
            of(|s| s.wal_bytes),
            of(|s| s.flushes),
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
