//! Every default, and its reason.

use std::time::Duration;

/// How long an answer is kept, and its key with it, from its completion: a day, as Stripe keeps a key
/// at least and most others do: long enough for a retry on the next morning's shift.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a key stays outstanding after its process has died: longer than a renewal may be late on
/// a busy database (renewals are due after a third), short enough for a client that waits.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// How many leases a handler may run before it is aborted: a handler that is still not done after
/// five minutes (at the default lease) hangs more likely than it works.
pub const DEFAULT_MAX_RUN_LEASES: u32 = 10;
/// The largest request body that is read, in bytes: 1 MiB. It is held in memory while the handler runs.
pub const DEFAULT_REQUEST_LIMIT: usize = 1024 * 1024;
/// The largest answer that is kept with its body, in bytes: 1 MiB.
pub const DEFAULT_RESPONSE_LIMIT: usize = 1024 * 1024;
/// How long a request body may take to arrive: what a slow phone needs for 1 MiB, and too little for
/// a client that sends a byte a minute.
pub const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an answer that is a stream may take until its body counts as not to be kept.
pub const DEFAULT_STREAM_TIMEOUT: Duration = Duration::from_secs(1);
/// How many protected requests run at once in a process: what a process survives rather than what it
/// should serve, since a handler whose client has gone goes on.
pub const DEFAULT_MAX_RUNNING: usize = 10_000;
/// How many requests wait at once in a process for another to finish: each holds its body, so that
/// with the default limit it is 256 MiB at worst.
pub const DEFAULT_MAX_WAITING: usize = 256;
/// What `Retry-After` says while a key is outstanding, unless its lease ends sooner.
pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// How long the store may take for what a request asks of it, the wait for a connection included: five
/// seconds, longer than a failover within a healthy network, shorter than a client's patience.
pub const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a transaction may be idle before Postgres ends it: thirty seconds, as the lease, so that
/// the locks of an owner that has stalled or been cut off go away when its key does.
pub const DEFAULT_IDLE_IN_TRANSACTION: Duration = Duration::from_secs(30);

/// The shortest lease: a renewal is due after a third of it, and must not come late on a busy machine.
pub const MIN_LEASE: Duration = Duration::from_millis(100);
