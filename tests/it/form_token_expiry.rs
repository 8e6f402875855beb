//! Form tokens expire by the clock of the database, in the claim; and their rows outlive them.

use std::time::Duration;

use actix_idempotency::{Isolation, OnOutstanding, Policy, Sweeper};
use actix_web::rt;

use crate::support::{
    client::RequestExt,
    db::{Db, pool},
    eventually,
    forms::{
        Forms, TEN_MINUTES, assert_first, assert_refused, db_with_a_clock, policies, rig_on, routes, set_clock, tokens,
    },
    proxy::{Do, Proxy},
    rig::Rig,
};

async fn rig(policy: Policy) -> Rig {
    rig_on(db_with_a_clock().await, policy.retention(TEN_MINUTES), tokens(&[1])).await
}

impl Rig {
    async fn clock(&self, shift: &str) {
        set_clock(&self.db, shift).await;
    }
}

#[actix_web::test]
async fn an_expired_token_claims_nothing() {
    for policy in policies() {
        let rig = rig(policy).await;
        let (token, late) = (rig.token("order").await, rig.token("order").await);
        rig.clock("9 min 30 s").await;
        assert_first(&rig.submit(&token, "a").answer().await);
        rig.clock("10 min 1 s").await;
        for _ in 0..2 {
            assert_refused(&rig.submit(&late, "b").answer().await, 403, "token-expired");
        }
        assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (1, 1));
        // A token that is issued now has expired, where this machine is so far behind the database.
        rig.clock("1 day").await;
        let fresh = rig.token("order").await;
        assert_refused(&rig.submit(&fresh, "c").answer().await, 403, "token-expired");
        rig.clock("0").await;
        assert_first(&rig.submit(&fresh, "c").answer().await);
    }
}

/// The same without any help: a real second.
#[actix_web::test]
async fn a_token_expires_when_its_lifetime_is_over() {
    let db = Db::new().await;
    let rig = rig_on(db, Policy::new(), tokens(&[1]).lifetime(Duration::from_secs(1))).await;
    let token = rig.token("order").await;
    let issued = rig.db.text("SELECT clock_timestamp()::text AS value").await.unwrap();
    let over = format!("clock_timestamp() > timestamptz '{issued}' + interval '1 s'");
    eventually("a second is over", || rig.db.is(&over)).await;
    assert_refused(&rig.submit(&token, "a").answer().await, 403, "token-expired");
    assert_eq!(rig.db.keys().await, 0);
}

#[actix_web::test]
async fn what_was_answered_is_answered_again_though_the_token_has_expired() {
    for policy in policies() {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        rig.clock("9 min").await;
        let first = rig.submit(&token, "a").answer().await;
        assert_first(&first);
        rig.clock("18 min").await;
        first.assert_replayed_by(&rig.submit(&token, "a").answer().await);
        assert_refused(&rig.submit(&token, "b").answer().await, 409, "token-used");
        // After the retention nothing is known of it, and it claims nothing.
        rig.clock("20 min").await;
        assert_refused(&rig.submit(&token, "a").answer().await, 403, "token-expired");
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

#[actix_web::test]
async fn a_token_that_was_given_back_cannot_be_claimed_again_once_it_has_expired() {
    for policy in policies() {
        let rig = rig(policy).await;
        let (rejected, failed) = (rig.token("order").await, rig.token("order").await);
        assert_eq!(rig.submit(&rejected, "").answer().await.status, 422);
        assert_eq!(rig.submit(&failed, "a").header("x-fail", "500").answer().await.status, 500);
        rig.clock("10 min 1 s").await;
        for (token, sku) in [(&rejected, ""), (&rejected, "a"), (&failed, "a")] {
            assert_refused(&rig.submit(token, sku).answer().await, 403, "token-expired");
        }
        assert_eq!(rig.db.all_effects().await, 0);
        // It is the clock that says so, and not that they were asked about.
        rig.clock("9 min").await;
        assert_first(&rig.submit(&rejected, "b").answer().await);
        assert_first(&rig.submit(&failed, "a").answer().await);
    }
}

/// The claim that takes a row over has seen it before; whether there still is time is asked again in it.
#[actix_web::test]
async fn a_token_that_expires_between_the_look_and_the_claim_claims_nothing() {
    let db = db_with_a_clock().await;
    let proxy = Proxy::before(&db.url);
    let pool = pool(&proxy.url(&db.url), 5);
    let rig = Rig::builder().on(db, pool).serve(routes(Policy::new(), tokens(&[1]))).await;
    let token = rig.token("order").await;
    assert_eq!(rig.submit(&token, "").answer().await.status, 422);
    for (sql, left) in [("UPDATE idempotency_keys AS k SET state = 'outstanding'", 1), ("INSERT INTO idempotency", 0)] {
        rig.clock("9 min").await;
        let held = proxy.next(sql, Do::HoldRequest);
        let late = rt::spawn(rig.submit(&token, "a").answer());
        held.happened().await;
        rig.clock("10 min 1 s").await;
        held.let_go();
        assert_refused(&late.await.unwrap(), 403, "token-expired");
        assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, left));
        rig.db.run("DELETE FROM idempotency_keys").await;
    }
}

/// The first try has landed; that its token expires before the second finds it does not matter.
#[actix_web::test]
async fn a_claim_whose_acknowledgement_is_lost_is_found_again_though_its_token_has_expired() {
    let db = db_with_a_clock().await;
    let proxy = Proxy::before(&db.url);
    let pool = pool(&proxy.url(&db.url), 5);
    let rig = Rig::builder().on(db, pool).serve(routes(Policy::new(), tokens(&[1]))).await;
    let token = rig.token("order").await;
    rig.clock("9 min 59 s").await;
    let lost = proxy.next("INSERT INTO idempotency_keys", Do::CutAnswer);
    let again = proxy.next("INSERT INTO idempotency_keys", Do::HoldRequest);
    let order = rt::spawn(rig.submit(&token, "a").answer());
    lost.happened().await;
    again.happened().await;
    rig.clock("10 min 1 s").await;
    again.let_go();
    assert_first(&order.await.unwrap());
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_lapsed_attempt_is_taken_over_while_its_token_lives_and_not_afterwards() {
    let rig = rig(Policy::new()).await;
    for (shift, taken_over) in [("9 min", true), ("10 min 1 s", false)] {
        rig.db.run("DELETE FROM idempotency_keys").await;
        rig.clock("0").await;
        let token = rig.token("order").await;
        assert_first(&rig.submit(&token, "a").answer().await);
        let key = rig.db.text("SELECT key AS value FROM idempotency_keys").await.unwrap();
        rig.db.lapse(&key).await;
        rig.clock(shift).await;
        let second = rig.submit(&token, "a").answer().await;
        if taken_over {
            assert_first(&second);
        } else {
            assert_refused(&second, 403, "token-expired");
            assert_eq!(rig.db.state(&key).await.as_deref(), Some("outstanding"));
        }
    }
    assert_eq!(rig.db.all_effects().await, 3);
}

#[actix_web::test]
async fn a_form_that_runs_when_its_token_expires_ends_well() {
    for policy in policies() {
        // Above that a running IdemTx holds its row, which is not renewed then.
        let policy = policy.isolation(Isolation::ReadCommitted);
        let rig = rig(policy.clone()).await;
        let token = rig.token("order").await;
        let held = rt::spawn(rig.submit(&token, "a").header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        let patient = policy.on_outstanding(OnOutstanding::Wait(crate::support::PATIENCE));
        let twin = rig.twin_serving(patient.clone(), routes(patient, tokens(&[1])));
        // Long enough for the token and shorter than the lease, which is renewed by that clock.
        rig.clock("9 min 59 s").await;
        let renewed = "NOT EXISTS (SELECT FROM idempotency_keys WHERE leased_until < clock_timestamp())";
        eventually("the lease is renewed", || rig.db.is(renewed)).await;
        rig.clock("10 min 1 s").await;
        let waits = rt::spawn(twin.submit(&token, "a").answer());
        assert_refused(&rig.submit(&token, "a").answer().await, 409, "outstanding");
        rig.gate.open(1);
        let first = held.await.unwrap();
        assert_first(&first);
        first.assert_replayed_by(&waits.await.unwrap());
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

/// The clock of the process is an hour ahead of the database's, so that a token lives for seventy minutes by the
/// latter, and the retention says ten.
#[actix_web::test]
async fn a_row_outlives_its_token_whatever_the_clocks_say() {
    for policy in policies() {
        let rig = rig(policy).await;
        rig.clock("-1 h").await;
        let (answered, rejected, corrected) =
            (rig.token("order").await, rig.token("order").await, rig.token("order").await);
        let first = rig.submit(&answered, "a").answer().await;
        assert_first(&first);
        for token in [&rejected, &corrected] {
            assert_eq!(rig.submit(token, "").answer().await.status, 422);
        }
        let second = rig.submit(&corrected, "b").answer().await;
        assert_first(&second);
        rig.clock("9 min").await;
        Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap();
        first.assert_replayed_by(&rig.submit(&answered, "a").answer().await);
        second.assert_replayed_by(&rig.submit(&corrected, "b").answer().await);
        assert_first(&rig.submit(&rejected, "c").answer().await);
        rig.clock("11 min").await;
        assert!(rig.submit(&rejected, "c").answer().await.is_replay());
        assert_eq!(rig.db.all_effects().await, 3);
    }
}

#[actix_web::test]
async fn rows_of_tokens_are_kept_for_ever_where_the_policy_says_so() {
    for policy in policies() {
        let rig = rig_on(db_with_a_clock().await, policy.retain_forever(), tokens(&[1])).await;
        let (token, rejected) = (rig.token("order").await, rig.token("order").await);
        let first = rig.submit(&token, "a").answer().await;
        assert_eq!(rig.submit(&rejected, "").answer().await.status, 422);
        assert_first(&rig.submit(&rejected, "b").answer().await);
        rig.clock("10 years").await;
        first.assert_replayed_by(&rig.submit(&token, "a").answer().await);
        assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_keys WHERE expires_at IS NULL").await, 2);
    }
}
