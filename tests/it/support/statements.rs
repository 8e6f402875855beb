//! How many statements a connection sends.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use diesel::connection::InstrumentationEvent;
use diesel_async::{AsyncConnection, AsyncPgConnection};

/// BEGIN and COMMIT count too.
pub struct Statements(Arc<AtomicUsize>);

impl Statements {
    pub fn of(conn: &mut AsyncPgConnection) -> Self {
        let sent = Arc::new(AtomicUsize::new(0));
        conn.set_instrumentation({
            let sent = sent.clone();
            move |event: InstrumentationEvent<'_>| {
                if matches!(event, InstrumentationEvent::StartQuery { .. }) {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self(sent)
    }

    /// Since it was last asked.
    pub fn sent(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}
