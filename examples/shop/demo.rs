//! Knobs for trying things out, and the lines to try.

use std::{net::SocketAddr, time::Duration};

use actix_web::{HttpRequest, Result, error::InternalError, http::StatusCode, rt::time::sleep};

/// `X-Demo-Slow-Ms: 1500` sleeps, `X-Demo-Fail: 500` (any status) or `panic` fails this attempt. They
/// are headers so that they are no part of the fingerprint.
pub async fn misbehave(request: &HttpRequest) -> Result<()> {
    let knob = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    if let Some(ms) = knob("x-demo-slow-ms").and_then(|ms| ms.parse().ok()) {
        sleep(Duration::from_millis(ms)).await;
    }
    match knob("x-demo-fail") {
        Some("panic") => panic!("X-Demo-Fail: panic"),
        Some(status) => {
            let status = status.parse().unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            Err(InternalError::new("this attempt fails, as X-Demo-Fail asked", status).into())
        }
        None => Ok(()),
    }
}

pub fn explain(address: SocketAddr) {
    println!(
        r#"
Try, in another terminal:

  order() {{ curl -si http://{address}/orders -H "Authorization: Bearer ${{NAME:-alice}}" \
    -H 'Content-Type: application/json' -d '{{"product_id": 1, "quantity": '${{QUANTITY:-2}}'}}' "$@"; echo; }}

  # a first answer, and its replay: the same bytes, marked Idempotency-Replayed
  order -H 'Idempotency-Key: a1'
  order -H 'Idempotency-Key: a1'

  # a double click: the second one gets 409 while the first runs
  order -H 'Idempotency-Key: a2' -H 'X-Demo-Slow-Ms: 3000' & sleep 1; order -H 'Idempotency-Key: a2'; wait

  # the same key with another order: 422
  QUANTITY=3 order -H 'Idempotency-Key: a1'

  # another user: another key
  NAME=bob order -H 'Idempotency-Key: a1'

  # a failed attempt gives the key back
  order -H 'Idempotency-Key: a3' -H 'X-Demo-Fail: 500'
  order -H 'Idempotency-Key: a3'

  # what there is now
  curl -s http://{address}/orders -H 'Authorization: Bearer alice'

A takeover: start `./with-postgres bash`, in it `LEASE_SECONDS=5 cargo run --release --example shop &`, send
an order with `X-Demo-Slow-Ms: 60000`, `kill -9` the shop, start it again, and retry: 409 until the lease has
lapsed, then the order is made.
"#
    );
}
