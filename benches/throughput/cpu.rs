//! CPU time of processes, from /proc.

use std::{fs, time::Duration};

/// Clock ticks per second: 100 on every Linux that matters.
const TICKS: u64 = 100;

pub fn of_process(id: u32) -> Duration {
    fs::read_to_string(format!("/proc/{id}/stat")).ok().and_then(|stat| ticks(&stat)).unwrap_or_default()
}

/// Of all processes of all Postgres servers on this machine.
pub fn of_postgres() -> Duration {
    let Ok(processes) = fs::read_dir("/proc") else { return Duration::ZERO };
    processes
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("stat")).ok())
        .filter(|stat| stat.contains("(postgres)"))
        .filter_map(|stat| ticks(&stat))
        .sum()
}

/// `utime` and `stime`, the 14th and 15th field.
fn ticks(stat: &str) -> Option<Duration> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 1000 / TICKS))
}
