//! Knobs for trying things out, and the lines to try.

use std::{
    future::{Ready, ready},
    net::SocketAddr,
    time::Duration,
};

use actix_web::{FromRequest, HttpRequest, dev::Payload, http::StatusCode, rt::time::sleep};

use crate::error::ShopError;

/// `X-Demo-Slow-Ms: 1500` sleeps, `X-Demo-Fail: 500` (any status) or `panic` makes this attempt fail. They
/// are headers so that they are no part of the fingerprint.
pub struct Knobs {
    slow: Duration,
    fail: Option<String>,
}

impl Knobs {
    /// After the work is done.
    pub async fn misbehave(self) -> Result<(), ShopError> {
        sleep(self.slow).await;
        match self.fail.as_deref() {
            None => Ok(()),
            Some("panic") => panic!("X-Demo-Fail: panic"),
            Some(status) => Err(ShopError::Demo(status.parse().unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))),
        }
    }
}

impl FromRequest for Knobs {
    type Error = ShopError;
    type Future = Ready<Result<Self, ShopError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let knob = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        let slow = knob("x-demo-slow-ms").and_then(|ms| ms.parse().ok()).unwrap_or(0);
        ready(Ok(Self { slow: Duration::from_millis(slow), fail: knob("x-demo-fail").map(str::to_owned) }))
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

  # an attempt that fails leaves nothing behind, and gives the key back
  order -H 'Idempotency-Key: a3' -H 'X-Demo-Fail: 500'
  order -H 'Idempotency-Key: a3'

  # a double click on a form without a key: the second one is told so, while the first runs and for 15 s after it
  coupon() {{ curl -si http://{address}/coupons -H "Authorization: Bearer ${{NAME:-alice}}" \
    -H 'Content-Type: application/json' -d '{{"coupon": "SPRING"}}' "$@"; echo; }}
  coupon -H 'X-Demo-Slow-Ms: 2000' & sleep 1; coupon; wait; coupon
  NAME=bob coupon

  # nobody overwrites what they have not seen: the ETag of an answer goes back as If-Match
  curl -si http://{address}/orders/1 -H 'Authorization: Bearer alice'; echo
  change() {{ curl -si -X PUT http://{address}/orders/1 -H "Authorization: Bearer ${{NAME:-alice}}" \
    -H 'Content-Type: application/json' -d '{{"quantity": '${{QUANTITY:-3}}'}}' "$@"; echo; }}
  change -H 'If-Match: "1"'               # 200, ETag: "2": the stock moves by the difference
  QUANTITY=5 change -H 'If-Match: "1"'    # 412, ETag: "2": somebody was first
  change                                  # 428: say which version you have seen
  change -H 'If-Match: "2'                # 400: unreadable is not absent
  NAME=bob change -H 'If-Match: *'        # 404: somebody else's order

  # the callback of a payment provider: a repeat gets success again, also by another message about the same order
  paid() {{ curl -si http://{address}/payments/callback -H 'Content-Type: application/json' \
    -d '{{"order_id": 1, "out_trade_no": "'${{1:-T1}}'"}}'; echo; }}
  paid; paid; paid T2
  change -H 'If-Match: *'                 # 409: an order that is paid is no longer changed

  # one to a customer in a campaign, whatever keys say
  campaign() {{ curl -si http://{address}/orders -H 'Authorization: Bearer alice' \
    -H 'Content-Type: application/json' -d '{{"product_id": 1, "quantity": 1, "campaign_id": 7}}' "$@"; echo; }}
  campaign -H 'Idempotency-Key: c1'; campaign -H 'Idempotency-Key: c2'    # 201; then 409 campaign-used

  # a form with a token, in a browser: http://{address}/checkout (any name, any password). Click twice, go back
  # and send it again, reload the answer: it is one order

  # what there is now: the stock and the orders add up
  curl -s http://{address}/orders -H 'Authorization: Bearer alice'
  curl -s http://{address}/products/1

A crash: send an order with `X-Demo-Slow-Ms: 20000`, `kill -9` the shop, start it again, and retry: the order is
made once. (In `./with-postgres bash`, so that the database outlives the shop.)

A takeover: the same with `LEASE_SECONDS=5` in the environment of both shops: a retry gets 409 until the lease of
the first attempt has lapsed, then it takes over.
"#
    );
}
