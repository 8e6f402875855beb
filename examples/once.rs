//! A job that cron starts on every machine, and that runs once a month.
//!
//!     ./with-postgres bash
//!     cargo run --example once -- 2026-11 &          # on one machine ...
//!     cargo run --example once -- 2026-11; wait      # ... and on another: one of them sends, the other waits
//!     cargo run --example once -- 2026-11            # done before
//!     cargo run --example once -- 2026-12            # another month is another job
//!     cargo run --example once -- november           # refused: this cannot be a month, so nothing is stored

use std::{env, time::Duration};

use actix_idempotency::{IdemKey, OnOutstanding, Once, OnceError, Outcome, Policy, Scope, migrations, pool};
use tokio::time::sleep;

/// The part that must not happen twice. A mail server that knows `Message-Id` would be given `derive("mail-7")`.
async fn send_invoices(month: &str, key: &IdemKey) -> Result<usize, String> {
    if month.len() != 7 {
        return Err(format!("{month} is no month"));
    }
    let customers = ["alice", "bob", "carol"];
    for customer in customers {
        // A step is not done again by the attempt that follows one that died half-way.
        key.step(customer, async || {
            sleep(Duration::from_secs(1)).await;
            println!("attempt {}: invoice of {month} for {customer}", key.attempt());
            Ok::<_, String>(())
        })
        .await
        .map_err(|error| error.to_string())?;
    }
    Ok(customers.len())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let month = env::args().nth(1).unwrap_or_else(|| "2026-11".into());
    migrations::run(&url).await?;

    let once = Once::postgres(pool(&url)?).with(
        Policy::new()
            .lease(Duration::from_secs(5))
            .retention(Duration::from_secs(400 * 24 * 60 * 60))
            .on_outstanding(OnOutstanding::Wait(Duration::from_secs(30))),
    );
    let name = month.clone();
    let sent =
        once.run(Scope::once("monthly-invoices"), &month, &(), |key: IdemKey| async move {
            send_invoices(&name, &key).await
        })
        .await;
    match sent {
        Ok(Outcome::Ran(invoices)) => println!("{invoices} invoices sent"),
        Ok(Outcome::Replayed(invoices)) => println!("done before: {invoices} invoices"),
        Ok(Outcome::Outstanding(wait)) => println!("another process is at it; ask again in {wait:?}"),
        Err(OnceError::Failed(error)) => println!("not done, and may be tried again: {error}"),
        Err(error) => println!("not run: {error}"),
    }
    Ok(())
}
