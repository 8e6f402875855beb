//! The named points of the path (`src/failpoint.rs`) in a server process: its parent says at which one it
//! stops, and when it goes on.

#[cfg(not(debug_assertions))]
compile_error!("the points of the path are there with debug assertions only: run the tests without --release");

use std::{
    io::stdin,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use actix_idempotency::failpoint;

/// What every line about points begins with, since the test harness writes lines of its own.
pub const PREFIX: &str = "point: ";

#[derive(Default)]
struct Orders {
    stop_at: Option<(String, u32)>,
    stopped: bool,
}

/// In the server process, obeys `stop POINT NTH` and `go` from stdin. A thread that comes to the point
/// for the nth time says so and stays there.
pub fn obey() {
    let orders = Arc::new((Mutex::new(Orders::default()), Condvar::new()));
    let hooked = Arc::clone(&orders);
    failpoint::on_reach(move |point| {
        let (mutex, changed) = &*hooked;
        let mut orders = mutex.lock().unwrap();
        match &mut orders.stop_at {
            Some((name, nth)) if name == point => *nth -= 1,
            _ => return,
        }
        if orders.stop_at.take_if(|(_, nth)| *nth == 0).is_some() {
            println!("{PREFIX}{point}");
            orders.stopped = true;
            drop(changed.wait_while(orders, |orders| orders.stopped).unwrap());
        }
    });
    thread::spawn(move || {
        for line in stdin().lines().map_while(Result::ok) {
            let (mutex, changed) = &*orders;
            let mut orders = mutex.lock().unwrap();
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["stop", point, nth] => {
                    orders.stop_at = Some((point.into(), nth.parse().unwrap()));
                    println!("{PREFIX}understood");
                }
                ["go"] => {
                    orders.stopped = false;
                    changed.notify_all();
                }
                _ => panic!("{line}?"),
            }
        }
        // The test is gone, however it ended.
        std::process::exit(0);
    });
}

/// The handler has come to this point.
pub fn reach(point: &'static str) {
    failpoint::reach(point);
}
