//! Keyed fingerprints, quotas, and the hooks around a stored answer.

use std::num::NonZeroU32;

use actix_idempotency::{
    Fields, IdemKey, Idempotency, Keep, KeySource, OnFailure, PgPool, Policy, Quota, ResponseSnapshot, Secret,
    migrations,
};
use actix_web::{
    HttpRequest, HttpResponse, Result, rt,
    web::{self, Data, ServiceConfig},
};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    app::{created, effect},
    client::{Answer, RequestExt},
    eventually,
    gate::Gate,
    rig::Rig,
};

/// Tells the key that it would give to others. `x-hold` holds it; `x-fail` makes the attempt fail.
async fn pay(request: HttpRequest, key: IdemKey, pool: Data<PgPool>, gate: Data<Gate>) -> Result<HttpResponse> {
    effect(&pool, "pay").await?;
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    let derived = json!({"derived": key.derive("charge"), "pin_of_the_card": "secret"});
    let fails = request.headers().contains_key("x-fail");
    Ok(if fails { HttpResponse::BadGateway() } else { HttpResponse::Created() }.json(derived))
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config.service(web::resource("/x").wrap(idempotency.clone()).route(web::post().to(pay)));
}

async fn rig(policy: Policy) -> Rig {
    Rig::builder().policy(policy).serve(routes).await
}

fn secret(byte: u8) -> Secret {
    Secret::new([byte; 32])
}

fn by_secrets<const N: usize>(secrets: [u8; N]) -> Policy {
    Policy::new().anonymous().fingerprint_secrets(secrets.map(secret))
}

const PIN: &str = r#"{"pin":"1234"}"#;

/// Z07
#[actix_web::test]
async fn a_keyed_fingerprint_cannot_be_made_without_the_secret() {
    let rig = rig(Policy::new().anonymous()).await;
    let keyed = [by_secrets([1]), by_secrets([1]), by_secrets([2]), by_secrets([2, 1])];
    let servers = keyed.map(|policy| rig.twin_serving(policy, routes));
    for key in ["plain", "plain-2"] {
        assert_eq!(rig.post("/x").key(key).body(PIN).answer().await.status, 201);
    }
    for (n, server) in servers.iter().enumerate() {
        assert_eq!(server.post("/x").key(&format!("keyed-{n}")).body(PIN).answer().await.status, 201);
    }
    let fingerprint = async |key: &str| {
        let sql = format!("SELECT encode(fingerprint, 'hex') AS value FROM idempotency_keys WHERE key = '{key}'");
        rig.db.text(&sql).await.unwrap()
    };
    // Without a secret it depends on the request alone.
    let plain = fingerprint("plain").await;
    assert_eq!(plain, fingerprint("plain-2").await);
    let (one, again, two) = (fingerprint("keyed-0").await, fingerprint("keyed-1").await, fingerprint("keyed-2").await);
    assert!(one == again && one != two && one != plain && two != plain);
    // The first secret makes new ones.
    assert_eq!(two, fingerprint("keyed-3").await);
}

/// Z07
#[actix_web::test]
async fn neither_can_a_key_that_is_a_digest() {
    let digest = |policy: Policy| policy.keys([KeySource::digest(Fields::all())]);
    let rig = rig(digest(Policy::new().anonymous())).await;
    let keyed = rig.twin_serving(digest(by_secrets([1])), routes);
    assert_eq!(rig.post("/x").body(PIN).answer().await.status, 201);
    let first = keyed.post("/x").body(PIN).answer().await;
    assert!(first.status == 201 && !first.is_replay());
    first.assert_replayed_by(&keyed.post("/x").body(PIN).answer().await);
    assert_eq!(rig.db.number("SELECT count(DISTINCT key) AS value FROM idempotency_keys").await, 2);
    assert_eq!(rig.db.number("SELECT count(DISTINCT fingerprint) AS value FROM idempotency_keys").await, 2);
}

/// Z07
#[actix_web::test]
async fn after_a_rotation_old_rows_are_compared_as_before() {
    let old = rig(by_secrets([1])).await;
    let both = old.twin_serving(by_secrets([2, 1]), routes);
    let new = old.twin_serving(by_secrets([2]), routes);
    let post = |key: &str| old.post("/x").key(key).body(PIN);

    let completed = post("completed").answer().await;
    assert_eq!(completed.status, 201);
    let failed = post("failed").header("x-fail", "1").answer().await;
    assert_eq!(failed.status, 502);
    let held = rt::spawn(post("held").header("x-hold", "1").answer());
    old.gate.entered(1).await;

    let post = |key: &str, body: &'static str| both.post("/x").key(key).body(body).answer();
    completed.assert_replayed_by(&post("completed", PIN).await);
    assert_eq!(post("completed", "other").await.code(), "key-reused");
    assert_eq!(post("held", PIN).await.code(), "outstanding");
    assert_eq!(post("held", "other").await.code(), "key-reused");
    assert_eq!(post("failed", "other").await.code(), "key-reused");
    // The retry is the same operation, for others as well; and the row goes on as it was.
    let retried = post("failed", PIN).await;
    assert!(retried.status == 201 && !retried.is_replay());
    assert_eq!(retried.json()["derived"], failed.json()["derived"]);
    retried.assert_replayed_by(&old.post("/x").key("failed").body(PIN).answer().await);

    // A secret that is gone compares nothing: what is answered is told, what runs is not disturbed.
    let post = |key: &str, body: &'static str| new.post("/x").key(key).body(body).answer();
    completed.assert_replayed_by(&post("completed", PIN).await);
    assert!(post("completed", "other").await.is_replay());
    for body in [PIN, "other"] {
        assert_eq!(post("held", body).await.code(), "outstanding");
    }
    assert_eq!(old.db.effects("pay").await, 4);
    old.gate.open(1);
    assert_eq!(held.await.unwrap().status, 201);
    // Whoever knows both compares what the new one writes.
    let first = post("new", PIN).await;
    first.assert_replayed_by(&both.post("/x").key("new").body(PIN).answer().await);
    assert_eq!(both.post("/x").key("new").body("other").answer().await.code(), "key-reused");
}

/// Z07
#[actix_web::test]
async fn an_attempt_that_cannot_be_compared_is_not_taken_over_while_it_may_have_had_effects() {
    let old = rig(by_secrets([1])).await;
    let new = old.twin_serving(by_secrets([2]), routes);
    let failed = old.post("/x").key("x").body(PIN).header("x-fail", "1").answer().await;
    assert_eq!(failed.status, 502);
    assert_eq!(new.post("/x").key("x").body(PIN).answer().await.code(), "outstanding");
    old.post("/x").key("lapsed").body(PIN).answer().await;
    old.db.lapse("lapsed").await;
    assert_eq!(new.post("/x").key("lapsed").body(PIN).answer().await.code(), "outstanding");
    assert_eq!(old.db.effects("pay").await, 2);
}

fn quota(outstanding: Option<u32>, live: Option<u32>) -> Quota {
    Quota { outstanding: outstanding.and_then(NonZeroU32::new), live: live.and_then(NonZeroU32::new) }
}

#[track_caller]
fn assert_over_quota(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (429, "quota-exceeded"));
    assert_eq!(answer.retry_after(), Some(1));
}

/// Z09
#[actix_web::test]
async fn whoever_has_ten_requests_running_gets_no_eleventh() {
    for indexed in [false, true] {
        let rig = rig(Policy::new().quota(quota(Some(10), None))).await;
        if indexed {
            migrations::run_pending(&rig.db.url, migrations::PRINCIPAL_INDEX).await.unwrap();
            assert!(rig.db.is("to_regclass('idempotency_keys_principal_idx') IS NOT NULL").await);
        }
        let post = |user: &str, key: &str| rig.post("/x").user(user).key(key);
        let mut held = Vec::new();
        for n in 0..10 {
            held.push(rt::spawn(post("a", &format!("k{n}")).header("x-hold", "1").answer()));
            rig.gate.entered(n + 1).await;
        }
        assert_over_quota(&post("a", "k10").answer().await);
        // Nothing was claimed, and nobody else is affected.
        assert_eq!(rig.db.keys().await, 10);
        for other in ["b", "c"] {
            assert_eq!(post(other, "k10").answer().await.status, 201);
        }
        assert_eq!(rig.post("/x").key("anonymous").answer().await.status, 201);
        // A retry of a key that exists is told what becomes of it.
        for n in 0..10 {
            assert_eq!(post("a", &format!("k{n}")).answer().await.code(), "outstanding");
        }
        rig.gate.open(10);
        let answers: Vec<_> = join_all(held).await.into_iter().map(Result::unwrap).collect();
        for (n, first) in answers.iter().enumerate() {
            assert_eq!(first.status, 201);
            first.assert_replayed_by(&post("a", &format!("k{n}")).answer().await);
        }
        assert_eq!(post("a", "k10").answer().await.status, 201);
    }
}

/// Z09
#[actix_web::test]
async fn whoever_has_so_many_keys_that_live_gets_no_other() {
    async fn submit(pool: Data<PgPool>, body: String) -> Result<HttpResponse> {
        let id = effect(&pool, "submit").await?;
        Ok(if body == "fail" { HttpResponse::BadRequest().finish() } else { created(id) })
    }
    let of_tenants = || {
        Policy::new()
            .tenant(|request| Some(request.headers().get("x-tenant")?.to_str().unwrap().to_owned()))
            .quota(quota(None, Some(2)))
    };
    for policy in [of_tenants(), of_tenants().atomic()] {
        for indexed in [false, true] {
            let rig = Rig::builder().policy(policy.clone()).handler(submit).await;
            if indexed {
                migrations::run_pending(&rig.db.url, migrations::PRINCIPAL_INDEX).await.unwrap();
            }
            let send = |user: Option<&str>, key: &str| {
                let request = rig.post("/x").key(key);
                if let Some(user) = user { request.user(user) } else { request }
            };
            for user in [Some("a"), None] {
                let key = |n: u32| format!("{}{n}", user.unwrap_or("nobody"));
                let first = send(user, &key(1)).answer().await;
                assert_eq!((first.status, send(user, &key(2)).answer().await.status.as_u16()), (first.status, 201));
                assert_over_quota(&send(user, &key(3)).answer().await);
                first.assert_replayed_by(&send(user, &key(1)).answer().await);
                assert_eq!(send(user, &key(1)).body("other").answer().await.code(), "key-reused");
                // The same principal elsewhere has keys of its own.
                assert_eq!(send(user, &key(3)).header("x-tenant", "t").answer().await.status, 201);
                // One that has expired makes room, whether or not it is swept.
                rig.db.age(&key(1), "2 days").await;
                assert_eq!(send(user, &key(3)).answer().await.status, 201);
                assert_over_quota(&send(user, &key(4)).answer().await);
            }
        }
    }
}

/// Z09
#[actix_web::test]
async fn of_requests_at_once_no_more_run_than_the_quota_says() {
    const MOST: usize = 3;
    let policy = Policy::new().quota(quota(Some(MOST as u32), None)).store_timeout(PATIENCE);
    let rig = rig(policy).await;
    let post = |key: &str| rig.post("/x").user("a").key(key);
    let keys: Vec<_> = (0..4 * MOST).map(|n| format!("k{n}")).collect();
    // All of them are new; then all have failed.
    for round in ["new", "failed"] {
        let held: Vec<_> = keys.iter().map(|key| rt::spawn(post(key).header("x-hold", "1").answer())).collect();
        eventually("the others are refused", async || held.iter().filter(|one| one.is_finished()).count() == 3 * MOST)
            .await;
        assert_eq!(rig.gate.count(), MOST, "{round}");
        rig.gate.open(MOST);
        let answers: Vec<_> = join_all(held).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), MOST, "{round}");
        answers.iter().filter(|answer| answer.status != 201).for_each(assert_over_quota);
        if round == "failed" {
            break;
        }
        rig.db.run("TRUNCATE idempotency_keys CASCADE").await;
        rig.gate.forget();
        for key in &keys {
            assert_eq!(post(key).header("x-fail", "1").answer().await.status, 502);
        }
    }
    // What is stored is told all the same, and so is a key that runs.
    let done: Vec<_> = rig
        .db
        .text("SELECT string_agg(key, ' ') AS value FROM idempotency_keys WHERE state = 'completed'")
        .await
        .unwrap()
        .split(' ')
        .map(str::to_owned)
        .collect();
    assert_eq!(done.len(), MOST);
    let free: Vec<_> = keys.iter().filter(|key| !done.contains(key)).collect();
    rig.gate.forget();
    let held: Vec<_> = free[..MOST].iter().map(|key| rt::spawn(post(key).header("x-hold", "1").answer())).collect();
    rig.gate.entered(MOST).await;
    assert_over_quota(&post(free[MOST]).answer().await);
    assert_eq!(post(free[0]).answer().await.code(), "outstanding");
    for key in &done {
        assert!(post(key).answer().await.is_replay());
    }
    rig.gate.open(MOST);
    join_all(held).await;
}

/// Z09
#[actix_web::test]
async fn a_retry_after_a_failure_is_within_the_quota() {
    let policy = Policy::new().quota(quota(Some(1), Some(1))).on_failure(OnFailure::Release);
    let rig = rig(policy).await;
    let post = |key: &str| rig.post("/x").user("a").key(key);
    assert_eq!(post("x").header("x-fail", "1").answer().await.status, 502);
    assert_over_quota(&post("y").answer().await);
    let second = post("x").answer().await;
    assert_eq!(second.status, 201);
    second.assert_replayed_by(&post("x").answer().await);
}

/// Z03
#[actix_web::test]
async fn a_right_that_was_taken_away_can_be_asked_for_again_before_a_replay() {
    let has_role = |request: &HttpRequest| request.headers().contains_key("x-role");
    let asks = |policy: Policy| policy.authorize_replay("The caller still has the role.", has_role);
    async fn submit(pool: Data<PgPool>) -> Result<HttpResponse> {
        Ok(created(effect(&pool, "submit").await?))
    }
    for policy in [asks(Policy::new()), asks(Policy::new()).atomic()] {
        let rig = Rig::builder().policy(policy).handler(submit).await;
        let post = || rig.post("/x").user("a").key("x");
        let first = post().header("x-role", "admin").answer().await;
        assert_eq!(first.status, 201);
        first.assert_replayed_by(&post().header("x-role", "admin").answer().await);
        let refused = post().answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (403, "replay-forbidden"));
        assert!(refused.retry_after().is_none() && refused.header("location").is_none());
        // It is asked about stored answers only; and a request that may see it sees it still.
        assert_eq!(rig.post("/x").user("a").key("y").answer().await.status, 201);
        first.assert_replayed_by(&post().header("x-role", "admin").answer().await);
        assert_eq!(rig.db.effects("submit").await, 2);
    }
    // A hook that panics shows nothing, and the server goes on.
    let panics = |_: &HttpRequest| panic!("no role to be found");
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = Rig::builder().policy(policy.authorize_replay("It panics.", panics)).handler(submit).await;
        let post = || rig.post("/x").user("a").key("x");
        assert_eq!(post().answer().await.status, 201);
        for _ in 0..2 {
            let refused = post().answer().await;
            assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "outcome-unknown"));
        }
        assert_eq!(rig.db.effects("submit").await, 1);
    }
    // Without the hook whoever is the principal gets the stored answer.
    let rig = Rig::builder().policy(Policy::new()).handler(submit).await;
    let first = rig.post("/x").user("a").key("x").header("x-role", "admin").answer().await;
    first.assert_replayed_by(&rig.post("/x").user("a").key("x").answer().await);
}

#[actix_web::test]
async fn what_is_redacted_reaches_the_first_client_and_nobody_else() {
    let redact = |snapshot: ResponseSnapshot| {
        let Some(body) = snapshot.body() else { return snapshot };
        let mut body: Value = serde_json::from_slice(body).unwrap();
        body.as_object_mut().unwrap().remove("pin_of_the_card");
        let body = body.to_string();
        snapshot.with_body(body)
    };
    async fn card(pool: Data<PgPool>) -> Result<HttpResponse> {
        let id = effect(&pool, "card").await?;
        Ok(HttpResponse::Created().insert_header(("etag", "\"1\"")).json(json!({"id": id, "pin_of_the_card": "4321"})))
    }
    for policy in [Policy::new().anonymous().redact(redact), Policy::new().anonymous().redact(redact).atomic()] {
        let rig = Rig::builder().policy(policy).handler(card).await;
        let first = rig.post("/x").key("x").answer().await;
        assert_eq!(first.json()["pin_of_the_card"], "4321");
        let replay = rig.post("/x").key("x").answer().await;
        assert!(replay.is_replay() && replay.status == 201);
        assert_eq!(replay.json(), json!({"id": first.json()["id"]}));
        assert_eq!(replay.header("etag"), Some("\"1\""));
        let told = "EXISTS (SELECT FROM idempotency_keys WHERE convert_from(body, 'UTF8') LIKE '%4321%')";
        assert!(!rig.db.is(told).await);
    }
}

#[actix_web::test]
async fn an_answer_can_tell_its_attempt_and_when_its_key_expires() {
    let rig = rig(Policy::new().anonymous().tell_attempt().tell_expiry()).await;
    let post = || rig.post("/x").key("x");
    let left = |answer: &Answer| -> u64 { answer.header("idempotency-key-expires-in").unwrap().parse().unwrap() };
    // A failure is not kept, and so has nothing that could expire.
    let failed = post().header("x-fail", "1").answer().await;
    assert_eq!((failed.status.as_u16(), failed.header("idempotency-key-expires-in")), (502, None));
    let second = post().answer().await;
    assert_eq!((second.status.as_u16(), second.header("idempotency-attempt")), (201, Some("2")));
    assert_eq!(left(&second), 86_400);
    // By the database's clock, whatever that of this machine says.
    rig.db.age("x", "10 hours").await;
    let replay = post().answer().await;
    assert!(replay.is_replay() && replay.header("idempotency-attempt") == Some("2"));
    assert!((50_300..=50_400).contains(&left(&replay)), "{replay:?}");
    // What never expires has no end.
    let forever = rig.twin_serving(Policy::new().anonymous().retain_forever().tell_expiry(), routes);
    for _ in 0..2 {
        let answer = forever.post("/x").key("forever").answer().await;
        assert_eq!((answer.status.as_u16(), answer.header("idempotency-key-expires-in")), (201, None));
        assert!(answer.header("idempotency-attempt").is_none());
    }
    // Nobody is told unless the policy says so.
    let silent = rig.twin_serving(Policy::new().anonymous().keep(Keep::Everything), routes);
    for _ in 0..2 {
        let answer = silent.post("/x").key("silent").answer().await;
        assert!(
            answer
                .headers
                .keys()
                .all(|name| !["idempotency-attempt", "idempotency-key-expires-in"].contains(&name.as_str()))
        );
    }
}

/// Z02
#[actix_web::test]
async fn the_same_form_from_two_sessions_is_two_requests() {
    async fn submit(pool: Data<PgPool>) -> Result<HttpResponse> {
        Ok(created(effect(&pool, "submit").await?))
    }
    let policy = Policy::new()
        .keys([KeySource::digest(Fields::all())])
        .principal(|request| {
            request.headers().get("cookie")?.to_str().ok()?.strip_prefix("session=").map(str::to_owned)
        })
        .refuse_anonymous();
    let rig = Rig::builder().policy(policy).handler(submit).await;
    let form = || rig.post("/x").header("content-type", "application/x-www-form-urlencoded").body("sku=a");
    let one = form().header("cookie", "session=1").answer().await;
    let two = form().header("cookie", "session=2").answer().await;
    assert!(one.status == 201 && two.status == 201 && !two.is_replay());
    one.assert_replayed_by(&form().header("cookie", "session=1").answer().await);
    assert_eq!(form().answer().await.code(), "principal-missing");
    assert_eq!((rig.db.effects("submit").await, rig.db.keys().await), (2, 2));
}
