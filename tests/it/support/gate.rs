//! Handlers that are held until the test lets them go, so that tests assert order, not time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::rt::time::timeout;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::PATIENCE;

/// Closed at first.
#[derive(Clone)]
pub struct Gate {
    entered: Arc<watch::Sender<usize>>,
    passes: Arc<Semaphore>,
}

impl Gate {
    pub fn new() -> Self {
        Self { entered: Arc::new(watch::channel(0).0), passes: Arc::new(Semaphore::new(0)) }
    }

    /// In the handler: says that it is here, and waits to be let go.
    pub async fn pass(&self) {
        self.entered.send_modify(|entered| *entered += 1);
        self.passes.acquire().await.unwrap().forget();
    }

    /// The same, and nothing else runs on this thread meanwhile.
    pub fn block(&self) {
        self.entered.send_modify(|entered| *entered += 1);
        let began = Instant::now();
        while self.passes.try_acquire().map(SemaphorePermit::forget).is_err() {
            assert!(began.elapsed() < PATIENCE, "nobody lets this handler go");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// In the test: until so many handlers have come here.
    pub async fn entered(&self, handlers: usize) {
        let mut entered = self.entered.subscribe();
        let waited = timeout(PATIENCE, entered.wait_for(|entered| *entered >= handlers)).await;
        assert!(waited.is_ok(), "{handlers} handlers should be at the gate");
    }

    /// Counts anew.
    pub fn forget(&self) {
        self.entered.send_replace(0);
    }

    pub fn count(&self) -> usize {
        *self.entered.borrow()
    }

    /// Lets so many handlers go, now or when they come.
    pub fn open(&self, handlers: usize) {
        self.passes.add_permits(handlers);
    }

    /// Whether another handler comes within this time.
    pub async fn nobody_enters(&self, during: Duration) -> bool {
        let mut entered = self.entered.subscribe();
        let now = *entered.borrow_and_update();
        timeout(during, entered.wait_for(|entered| *entered > now)).await.is_err()
    }
}
