//! The one thread on which everything runs that must go on while a handler blocks its worker:
//! connections are driven, leases renewed, waiters woken, late answers stored, rows swept.

use std::{future::pending, sync::OnceLock, thread};

use tokio::runtime::{Builder, Handle};

/// The runtime of that thread, which starts with the first pool or engine of the process and lives as
/// long as the process: what still has to be stored when an engine goes finds it there.
///
/// # Panics
///
/// If the operating system refuses a thread.
pub(crate) fn handle() -> &'static Handle {
    static HANDLE: OnceLock<Handle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("actix-idempotency: the runtime of the background thread cannot start");
        let handle = runtime.handle().clone();
        thread::Builder::new()
            .name("actix-idempotency".into())
            .spawn(move || runtime.block_on(pending::<()>()))
            .expect("actix-idempotency: the background thread cannot start");
        handle
    })
}
