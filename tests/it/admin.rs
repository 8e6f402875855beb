//! The people who run the service see what is stuck, and get it going again.

use std::time::Duration;

use actix_idempotency::{
    Admin, ErrorKind, IdemKey, IdemTx, Isolation, OnOutstanding, PgPool, Policy, Scope, Sweeper,
    admin::{Acted, ERASE_BATCH, Entry, STRETCH, STRETCHES, Search, State},
    migrations,
};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    rt::{
        spawn,
        time::{sleep, timeout},
    },
    web::{self, Data, ServiceConfig},
};
use diesel_async::SimpleAsyncConnection;
use futures_util::future::{join, join_all};
use reqwest::RequestBuilder;

use crate::support::{
    app::{created, effect, effect_in},
    client::{Answer, Raw, RequestExt, client, post},
    db::{Db, assert_usable, pool},
    eventually,
    gate::Gate,
    log,
    process::Setup,
    rig::Rig,
};

/// The effect; then, for a request with `x-hold`, the gate. `tag` is the body.
async fn plain(request: HttpRequest, pool: Data<PgPool>, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    let id = effect(&pool, &tag).await?;
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    Ok(created(id))
}

/// The same in one commit with the answer.
async fn in_tx(request: HttpRequest, mut tx: IdemTx, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    let id = effect_in(&mut tx, &tag).await?;
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    Ok(created(id))
}

/// Its effect is a step.
async fn in_steps(pool: Data<PgPool>, key: IdemKey, tag: String) -> Result<HttpResponse> {
    Ok(created(key.step("effect", async || effect(&pool, &tag).await).await?))
}

fn policy() -> Policy {
    Policy::new().anonymous()
}

/// Whose tenant and principal are headers.
fn of_somebody() -> Policy {
    let header =
        |name: &'static str| move |request: &HttpRequest| request.headers().get(name)?.to_str().ok().map(str::to_owned);
    Policy::new().principal(header("x-user")).tenant(header("x-tenant"))
}

async fn rig(policy: Policy) -> Rig {
    let routes = move |config: &mut ServiceConfig, idempotency: &actix_idempotency::Idempotency, _: &PgPool| {
        config.service(
            web::scope("")
                .wrap(idempotency.clone())
                .route("/plain", web::post().to(plain))
                .route("/tx", web::post().to(in_tx))
                .route("/steps", web::post().to(in_steps)),
        );
    };
    // Above that a running IdemTx holds its row, and a forced release finds it locked.
    Rig::builder().policy(policy).pool_size(8).database(Db::read_committed().await).serve(routes).await
}

trait Held {
    fn held(self) -> Self;
}

impl Held for RequestBuilder {
    fn held(self) -> Self {
        self.header("x-hold", "1")
    }
}

/// The one row with this key.
async fn seen(admin: &Admin, key: &str) -> Entry {
    let found = admin.search(&Search::new().key(key)).await.unwrap();
    assert_eq!(found.entries.len(), 1, "{found:?}");
    found.entries.into_iter().next().unwrap()
}

async fn keys(admin: &Admin, search: Search) -> Vec<String> {
    admin.search(&search).await.unwrap().entries.into_iter().map(|entry| entry.key).collect()
}

// --- M01: a stuck key -----------------------------------------------------------------------------------------

/// A process has claimed the key of a job, and was killed when its effect was there.
async fn killed_at_work(db: &Db, key: &str, lease: Duration) {
    let mut doomed = Setup { lease, ..Setup::new(&db.url) }.start();
    doomed.stop_at("in-job", 1).await;
    let mut request = Raw::connect(doomed.address).await;
    request.send(post(&format!("/jobs/{key}"), "unused", "1")).await.unwrap();
    doomed.stopped_at("in-job").await;
    doomed.kill();
}

#[actix_web::test]
async fn the_key_of_a_killed_process_is_released_and_the_next_retry_runs() {
    log::listen();
    let db = Db::new().await;
    killed_at_work(&db, "m01-forced", Duration::from_secs(30)).await;
    killed_at_work(&db, "m01-lapsed", Duration::from_millis(300)).await;
    let admin = Admin::postgres(db.pool(2));
    let again = Setup::new(&db.url).start();
    let retry = async |key: &str| client().post(again.url(&format!("/jobs/{key}"))).body("1").answer().await.json();

    // Its process is dead, its lease is not.
    let forced = admin.look(&Scope::once("job"), "m01-forced").await.unwrap().unwrap();
    assert_eq!((forced.state, forced.attempt, forced.domain.as_str()), (State::Outstanding, 1, "once"));
    assert!(forced.lease_left.unwrap() <= Duration::from_secs(30));
    assert!(retry("m01-forced").await["outstanding"].is_u64());
    let Acted::Live { lease_left: Some(left) } = admin.release(&forced).await.unwrap() else { panic!("it is live") };
    assert!(left <= Duration::from_secs(30));
    assert_eq!(db.state("m01-forced").await.as_deref(), Some("outstanding"));
    assert_eq!(admin.force_release(&forced).await.unwrap(), Acted::Done);
    assert!(retry("m01-forced").await["ran"].is_i64());
    assert!(retry("m01-forced").await["replayed"].is_i64());

    let look = async || admin.look(&Scope::once("job"), "m01-lapsed").await.unwrap().unwrap();
    eventually("the lease lapses", async || look().await.state == State::Lapsed).await;
    let lapsed = look().await;
    assert_eq!((lapsed.lease_left, lapsed.status), (None, None));
    assert_eq!(admin.release(&lapsed).await.unwrap(), Acted::Done);
    assert_eq!(look().await.state, State::Released);
    assert_eq!(admin.release(&lapsed).await.unwrap(), Acted::Changed);
    assert_eq!(admin.release(&look().await).await.unwrap(), Acted::Unfit(State::Released));
    assert!(retry("m01-lapsed").await["ran"].is_i64());
    for (key, event) in [("m01-forced", "force-released"), ("m01-lapsed", "released-by-hand")] {
        assert_eq!(log::count(&db.id(key).await, event), 1, "{key}");
    }
}

#[actix_web::test]
async fn a_live_owner_whose_key_was_taken_stores_nothing_and_sends_what_the_next_attempt_has_stored() {
    log::listen();
    for (path, runs) in [("/plain", 2), ("/tx", 1)] {
        let rig = rig(policy()).await;
        let admin = Admin::of(&rig.idempotency);
        let key = format!("taken-from{}", path.replace('/', "-"));
        let ask = || rig.post(path).key(&key).body("x");
        let owner = spawn(ask().held().answer());
        rig.gate.entered(1).await;
        let live = seen(&admin, &key).await;
        assert!(matches!(admin.release(&live).await.unwrap(), Acted::Live { .. }));
        assert_eq!(admin.expire(&live).await.unwrap(), Acted::Unfit(State::Outstanding));
        assert_eq!(admin.force_release(&live).await.unwrap(), Acted::Done);
        assert_eq!(admin.force_release(&live).await.unwrap(), Acted::Changed);
        // What it has done is unknown, so that another request may not use the key.
        assert_eq!(rig.post(path).key(&key).body("y").answer().await.code(), "key-reused");
        let next = ask().answer().await;
        assert_eq!((next.status.as_u16(), next.is_replay()), (201, false));
        rig.gate.open(1);
        next.assert_replayed_by(&owner.await.unwrap());
        assert_eq!(rig.db.effects("x").await, runs, "{path}");
        next.assert_replayed_by(&ask().answer().await);
        let id = rig.db.id(&key).await;
        assert_eq!((log::count(&id, "force-released"), log::count(&id, "lease-lost")), (1, 1), "{path}");
    }
}

#[actix_web::test]
async fn an_owner_whose_key_was_taken_and_not_retried_yet_is_told_that_it_lost_it() {
    for (path, runs) in [("/plain", 2), ("/tx", 1)] {
        let rig = rig(policy()).await;
        let admin = Admin::postgres(rig.db.pool(1));
        let owner = spawn(rig.post(path).key("a").body("x").held().answer());
        rig.gate.entered(1).await;
        assert_eq!(admin.force_release(&seen(&admin, "a").await).await.unwrap(), Acted::Done);
        rig.gate.open(1);
        assert_eq!(owner.await.unwrap().code(), "lease-lost");
        assert_eq!(seen(&admin, "a").await.state, State::Released);
        let next = rig.post(path).key("a").body("x").answer().await;
        assert_eq!((next.status.as_u16(), next.is_replay()), (201, false));
        assert_eq!(rig.db.effects("x").await, runs, "{path}");
    }
}

#[actix_web::test]
async fn whoever_waits_for_a_key_runs_it_when_it_is_released() {
    log::listen();
    for (key, shares_the_engine) in [("waited-for-here", true), ("waited-for-there", false)] {
        let rig = rig(policy().on_outstanding(OnOutstanding::Wait(Duration::from_secs(25)))).await;
        let admin = if shares_the_engine { Admin::of(&rig.idempotency) } else { Admin::postgres(rig.db.pool(1)) };
        let owner = spawn(rig.post("/tx").key(key).body("x").held().answer());
        rig.gate.entered(1).await;
        let waiting = spawn(rig.post("/tx").key(key).body("x").answer());
        let id = rig.db.id(key).await;
        eventually("it waits", async || log::count(&id, "waited") == 1).await;
        assert_eq!(admin.force_release(&seen(&admin, key).await).await.unwrap(), Acted::Done);
        let ran = waiting.await.unwrap();
        assert_eq!((ran.status.as_u16(), ran.is_replay()), (201, false));
        rig.gate.open(1);
        ran.assert_replayed_by(&owner.await.unwrap());
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

// --- under concurrency ----------------------------------------------------------------------------------------

#[actix_web::test]
async fn of_an_owner_that_completes_and_a_forced_release_one_wins() {
    for path in ["/plain", "/tx"] {
        let rig = rig(policy()).await;
        let pool = if path == "/tx" { rig.db.serializable_pool(2) } else { rig.db.pool(2) };
        let admin = Admin::postgres(pool);
        let mut head_start = Duration::from_millis(1);
        for round in 1..=50 {
            let key = format!("k{round}");
            let ask = || rig.post(path).key(&key).body(key.clone());
            let owner = spawn(ask().held().answer());
            rig.gate.entered(round).await;
            let live = seen(&admin, &key).await;
            rig.gate.open(1);
            // As much as leaves it open who is first, whatever machine this is.
            sleep(head_start).await;
            let acted = admin.force_release(&live).await;
            let answer = owner.await.unwrap();
            let own = i64::from(answer.status == 201);
            match acted.unwrap() {
                Acted::Done => assert_eq!((answer.code().as_str(), own), ("lease-lost", 0)),
                Acted::Changed | Acted::Locked => assert_eq!((answer.status.as_u16(), own), (201, 1)),
                other => panic!("{other:?}"),
            }
            let step = Duration::from_micros(500);
            head_start = if own == 1 { head_start.saturating_sub(step) } else { head_start + step };
            let state = rig.db.state(&key).await.unwrap();
            assert_eq!(state, if own == 1 { "completed" } else { "released" });
            let next = ask().answer().await;
            assert_eq!((next.status.as_u16(), next.is_replay()), (201, own == 1));
            // One commit for the answer; what a lost attempt has done outside of it is done.
            let runs = if path == "/tx" { 1 } else { 2 - own };
            assert_eq!(rig.db.effects(&key).await, runs, "{path} {round}");
        }
    }
}

#[actix_web::test]
async fn a_release_and_a_takeover_get_the_key_to_one_attempt() {
    let rig = rig(policy()).await;
    let admin = Admin::postgres(rig.db.pool(2));
    for round in 0..30 {
        let key = format!("k{round}");
        let ask = || rig.post("/plain").key(&key).body(key.clone());
        assert_eq!(ask().answer().await.status, 201);
        rig.db.lapse(&key).await;
        let lapsed = seen(&admin, &key).await;
        assert_eq!(lapsed.state, State::Lapsed);
        let retry = async {
            loop {
                let answer: Answer = ask().answer().await;
                if answer.status != 409 {
                    return answer;
                }
            }
        };
        let (acted, retry) = join(admin.release(&lapsed), retry).await;
        assert!(matches!(acted.as_ref().unwrap(), Acted::Done | Acted::Changed | Acted::Locked), "{acted:?}");
        assert_eq!((retry.status.as_u16(), retry.is_replay()), (201, false));
        retry.assert_replayed_by(&ask().answer().await);
        assert_eq!(rig.db.effects(&key).await, 2);
    }
}

#[actix_web::test]
async fn of_many_hands_one_does_it_whatever_the_isolation() {
    let rig = rig(policy()).await;
    for (name, pool) in [("a", rig.db.pool(8)), ("b", rig.db.serializable_pool(8))] {
        let admin = Admin::postgres(pool.clone());
        assert_eq!(rig.post("/plain").key(name).body("x").answer().await.status, 201);
        rig.db.lapse(name).await;
        let lapsed = seen(&admin, name).await;
        let acted = join_all((0..20).map(|n| {
            let (admin, lapsed) = (&admin, &lapsed);
            async move { if n % 2 == 0 { admin.release(lapsed).await } else { admin.force_release(lapsed).await } }
        }))
        .await;
        let acted: Vec<Acted> = acted.into_iter().map(Result::unwrap).collect();
        assert_eq!(acted.iter().filter(|acted| **acted == Acted::Done).count(), 1, "{acted:?}");
        assert!(acted.iter().all(|acted| matches!(acted, Acted::Done | Acted::Changed | Acted::Locked)), "{acted:?}");

        assert_eq!(rig.post("/plain").key(name).body("x").answer().await.status, 201);
        let completed = seen(&admin, name).await;
        let acted = join_all((0..20).map(|_| admin.expire(&completed))).await;
        // To expire what has expired changes nothing.
        assert!(acted.iter().all(|acted| matches!(acted, Ok(Acted::Done | Acted::Locked))), "{acted:?}");
        assert_eq!(seen(&admin, name).await.state, State::Expired);
        assert_eq!(admin.erase(None, "nobody").await.unwrap().gone, 0);
        assert!(admin.numbers().await.unwrap().is_whole);
        assert_usable(&pool, 8).await;
    }
}

#[actix_web::test]
async fn a_row_that_somebody_holds_is_left_alone_and_nobody_waits_for_it() {
    let rig = rig(policy().isolation(Isolation::RepeatableRead)).await;
    let admin = Admin::postgres(rig.db.pool(2));
    // Above READ COMMITTED a transaction holds the row of its key.
    let owner = spawn(rig.post("/tx").key("a").body("x").held().answer());
    rig.gate.entered(1).await;
    let live = seen(&admin, "a").await;
    let acted = timeout(Duration::from_secs(4), admin.force_release(&live)).await.expect("nobody waits");
    assert_eq!(acted.unwrap(), Acted::Locked);
    rig.gate.open(1);
    assert_eq!(owner.await.unwrap().status, 201);
    assert_eq!(admin.force_release(&live).await.unwrap(), Acted::Changed);

    let completed = seen(&admin, "a").await;
    let mut holder = rig.db.connect().await;
    holder.batch_execute("BEGIN; SELECT FROM idempotency_keys FOR UPDATE").await.unwrap();
    assert_eq!(admin.expire(&completed).await.unwrap(), Acted::Locked);
    holder.batch_execute("ROLLBACK; DELETE FROM idempotency_keys").await.unwrap();
    assert_eq!(admin.expire(&completed).await.unwrap(), Acted::Gone);
}

#[actix_web::test]
async fn an_action_that_is_dropped_leaves_the_pool_usable() {
    let rig = rig(policy()).await;
    let pool = rig.db.pool(2);
    let admin = Admin::postgres(pool.clone());
    assert_eq!(rig.post("/plain").key("a").body("x").answer().await.status, 201);
    for round in 0..40 {
        rig.db.lapse("a").await;
        let lapsed = seen(&admin, "a").await;
        let _ = timeout(Duration::from_micros(round * 100), admin.force_release(&lapsed)).await;
    }
    assert_usable(&pool, 2).await;
    // Whatever became of the last one.
    assert_eq!(rig.post("/plain").key("a").body("x").answer().await.status, 201);
}

// --- looking --------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_row_tells_what_it_holds_but_for_the_answer_itself() {
    log::listen();
    let rig = rig(of_somebody()).await;
    let admin = Admin::of(&rig.idempotency);
    let ask =
        || rig.post("/plain").key("sesame-qzx").header("x-user", "alice-qzx").header("x-tenant", "acme-qzx").body("x");
    let first = ask().answer().await;
    let scope = Scope::request("POST /plain").for_principal("alice-qzx").for_tenant("acme-qzx");
    let entry = admin.look(&scope, "sesame-qzx").await.unwrap().unwrap();
    assert_eq!(
        (entry.key.as_str(), entry.resource.as_str(), entry.domain.as_str()),
        ("sesame-qzx", "POST /plain", "http")
    );
    assert_eq!((entry.principal.as_deref(), entry.tenant.as_deref()), (Some("alice-qzx"), Some("acme-qzx")));
    assert_eq!((entry.state, entry.attempt, entry.status, entry.lease_left), (State::Completed, 1, Some(201), None));
    assert_eq!(entry.body_size, Some(first.body.len() as u64));
    assert!(entry.header_names.iter().any(|name| name == "location"), "{:?}", entry.header_names);
    let day = Duration::from_secs(24 * 60 * 60);
    assert!(entry.expires_in.unwrap() <= day && entry.expires_in.unwrap() > day / 2);
    let age = entry.completed_at.unwrap().duration_since(entry.created_at).unwrap();
    assert!(age < Duration::from_secs(30) && entry.created_at.elapsed().unwrap() < Duration::from_secs(60));

    // By what a log line shows.
    let id = rig.db.id("sesame-qzx").await;
    let found = admin.find(&id).await.unwrap();
    assert_eq!(found.iter().map(Entry::id).collect::<Vec<_>>(), [entry.id()]);
    assert_eq!(admin.find(&entry.id().to_uppercase()).await.unwrap().len(), 1);
    let others = ["", "x", &"0".repeat(65), "' OR 1=1 --", "é"];
    for text in others {
        assert!(admin.find(text).await.unwrap().is_empty(), "{text}");
    }
    assert!(admin.look(&scope, "no key").await.unwrap().is_none());
    assert!(admin.look(&Scope::request("POST /plain"), "sesame-qzx").await.unwrap().is_none());

    let answer = admin.answer(&entry).await.unwrap().unwrap();
    assert_eq!((answer.status().as_u16(), answer.body().unwrap().as_ref()), (201, &first.body[..]));
    first.assert_replayed_by(&ask().answer().await);

    // Nothing of that is in what is printed by chance, or in the log.
    assert_eq!(admin.expire(&entry).await.unwrap(), Acted::Done);
    assert_eq!(admin.erase(Some("acme-qzx"), "alice-qzx").await.unwrap().gone, 1);
    let search = Search::new().key("sesame-qzx").principal("alice-qzx").tenant("acme-qzx");
    let said: Vec<_> = log::all().into_iter().filter(|line| format!("{line:?}").contains("qzx")).collect();
    assert!(said.is_empty(), "{said:?}");
    let found = admin.search(&search).await.unwrap();
    let shown = format!("{entry:?} {search:?} {found:?} {answer:?} {admin:?} {scope:?}");
    let body = first.json()["random"].as_str().unwrap().to_owned();
    assert!(!shown.contains("qzx") && !shown.contains(&body), "{shown}");
    assert_eq!(log::count(&id, "expired-by-hand"), 1);
    assert!(log::all().iter().any(|line| line.get("event") == Some("erased") && line.get("gone") == Some("1")));
}

#[actix_web::test]
async fn a_search_finds_by_key_resource_tenant_and_principal_the_newest_first() {
    let rig = rig(of_somebody()).await;
    let admin = Admin::postgres(rig.db.pool(2));
    for (key, user, path) in
        [("a", "alice", "/plain"), ("b", "alice", "/tx"), ("c", "bob", "/plain"), ("d", "bob", "/tx")]
    {
        let asked = rig.post(path).key(key).header("x-user", user).header("x-tenant", "acme").body("x");
        assert_eq!(asked.answer().await.status, 201);
    }
    for indexed in [false, true] {
        if indexed {
            migrations::run_pending(&rig.db.url, migrations::PRINCIPAL_INDEX).await.unwrap();
        }
        assert_eq!(keys(&admin, Search::new()).await, ["d", "c", "b", "a"]);
        assert_eq!(keys(&admin, Search::new().limit(2.try_into().unwrap())).await, ["d", "c"]);
        assert_eq!(keys(&admin, Search::new().key("b")).await, ["b"]);
        assert_eq!(keys(&admin, Search::new().resource("POST /tx")).await, ["d", "b"]);
        assert_eq!(keys(&admin, Search::new().principal("alice")).await, ["b", "a"]);
        assert_eq!(keys(&admin, Search::new().principal("alice").resource("POST /tx").tenant("acme")).await, ["b"]);
        assert_eq!(keys(&admin, Search::new().state(State::Completed).status(201..=201)).await, ["d", "c", "b", "a"]);
        assert!(keys(&admin, Search::new().state(State::Released)).await.is_empty());
        assert!(keys(&admin, Search::new().status(500..=599)).await.is_empty());
        let b = seen(&admin, "b").await.created_at;
        assert_eq!(keys(&admin, Search::new().claimed_before(b)).await, ["a"]);
        let later = b + Duration::from_millis(1);
        assert_eq!(keys(&admin, Search::new().claimed_from(later).principal("bob")).await, ["d", "c"]);
        for nobody in [Search::new().tenant("other"), Search::new().principal("al"), Search::new().outstanding()] {
            assert!(keys(&admin, nobody).await.is_empty());
        }
    }
}

/// A key for each n, as the row of `key` is, completed.
pub fn more_rows(key: &str, rows: i64) -> String {
    format!(
        "INSERT INTO idempotency_keys (id, domain, tenant, principal, resource, key, fingerprint, recipe, recipe_version, \
         state, owner, attempt, seed, created_at, leased_until, completed_at, expires_at, status, header_names, \
         header_values, body, snapshot_version) SELECT sha256(n::text::bytea), domain, tenant, principal, resource, \
         'n' || n, fingerprint, recipe, recipe_version, 'completed', owner, 1, seed, now(), now(), now(), \
         now() + interval '1 day', 200, '{{}}', '{{}}', '1', 1 FROM idempotency_keys, generate_series(1, {rows}) AS n \
         WHERE key = '{key}'"
    )
}

#[actix_web::test]
async fn what_is_outstanding_is_listed_oldest_first_and_a_bounded_look_says_so() {
    let rig = rig(policy()).await;
    let admin = Admin::postgres(rig.db.pool(2));
    for key in ["old", "lapsed", "done"] {
        assert_eq!(rig.post("/plain").key(key).body("x").answer().await.status, 201);
    }
    let held = spawn(rig.post("/plain").key("live").body("x").held().answer());
    rig.gate.entered(1).await;
    for key in ["lapsed", "old"] {
        rig.db.lapse(key).await;
    }
    let list = async || admin.outstanding().await.unwrap();
    let named = |found: &actix_idempotency::admin::Found| {
        found.entries.iter().map(|entry| entry.key.clone()).collect::<Vec<_>>()
    };
    let all = list().await;
    assert_eq!(
        (named(&all), all.is_whole, all.rest.is_none()),
        (vec!["old".into(), "lapsed".into(), "live".into()], true, true)
    );
    assert_eq!(
        all.entries.iter().map(|entry| entry.state).collect::<Vec<_>>(),
        [State::Lapsed, State::Lapsed, State::Outstanding]
    );
    let numbers = admin.numbers().await.unwrap();
    assert_eq!((numbers.outstanding, numbers.is_whole, numbers.oldest_expired), (3, true, None));
    assert!(numbers.bytes > 0 && numbers.oldest_outstanding.unwrap() < Duration::from_secs(60));

    // A table that is not looked through at once.
    rig.db.run(&more_rows("done", i64::from(STRETCH * STRETCHES) + 500)).await;
    let mut found = list().await;
    assert!(!found.is_whole);
    let mut keys = named(&found);
    while let Some(rest) = found.rest {
        found = admin.search(&Search::new().outstanding().after(rest)).await.unwrap();
        keys.extend(named(&found));
    }
    assert!(found.is_whole);
    keys.sort();
    assert_eq!(keys, ["lapsed", "live", "old"]);
    assert!(!admin.numbers().await.unwrap().is_whole);

    migrations::run_pending(&rig.db.url, migrations::OUTSTANDING_INDEX).await.unwrap();
    rig.db.run("ANALYZE idempotency_keys").await;
    let found = list().await;
    assert_eq!((named(&found), found.is_whole), (vec!["old".into(), "lapsed".into(), "live".into()], true));
    let numbers = admin.numbers().await.unwrap();
    assert_eq!((numbers.outstanding, numbers.is_whole), (3, true));
    rig.gate.open(1);
    assert_eq!(held.await.unwrap().status, 201);
    eventually("the statistics have come", async || admin.numbers().await.unwrap().live_rows >= 100_000).await;
    assert_eq!(admin.numbers().await.unwrap().outstanding, 2);
}

#[actix_web::test]
async fn what_was_given_back_half_done_is_found_with_its_steps() {
    let rig = rig(policy()).await;
    let admin = Admin::of(&rig.idempotency);
    assert_eq!(rig.post("/steps").key("half").body("x").answer().await.status, 201);
    assert_eq!(rig.post("/plain").key("whole").body("x").answer().await.status, 201);
    rig.db.lapse("half").await;
    rig.db.run("UPDATE idempotency_keys SET state = 'released', acted = true, status = 502 WHERE key = 'half'").await;
    let search = Search::new().state(State::Released).status(500..=599);
    for indexed in [false, true] {
        if indexed {
            migrations::run_pending(&rig.db.url, migrations::OUTSTANDING_INDEX).await.unwrap();
        }
        assert_eq!(keys(&admin, search.clone()).await, ["half"]);
    }
    let entry = seen(&admin, "half").await;
    assert_eq!((entry.state, entry.status, entry.acted), (State::Released, Some(502), true));
    let steps = admin.steps(&entry).await.unwrap().unwrap();
    assert_eq!(steps.iter().map(|step| step.name.as_str()).collect::<Vec<_>>(), ["effect"]);
    assert!(steps[0].result_size.unwrap() > 0 && steps[0].done_at >= entry.created_at);
    // Those of an operation that is over are not those of the next.
    rig.db.run("UPDATE idempotency_keys SET seed = sha256('another')").await;
    assert_eq!(admin.steps(&entry).await.unwrap(), Some(vec![]));
    // Who may not read them is told so.
    let role = rig.db.service_role().await;
    assert_eq!(Admin::postgres(pool(&role.url, 1)).steps(&entry).await.unwrap(), None);
}

#[actix_web::test]
async fn how_long_the_sweeper_has_been_behind_is_told() {
    let rig = rig(policy()).await;
    let admin = Admin::postgres(rig.db.pool(1));
    for (key, age) in [("young", "1 hour"), ("old", "30 hours"), ("older", "34 hours")] {
        assert_eq!(rig.post("/plain").key(key).body("x").answer().await.status, 201);
        rig.db.age(key, age).await;
    }
    let ago = admin.numbers().await.unwrap().oldest_expired.unwrap();
    let hour = Duration::from_secs(60 * 60);
    assert!(ago >= 10 * hour && ago < 11 * hour, "{ago:?}");
    assert_eq!(admin.numbers().await.unwrap().oldest_outstanding, None);
}

#[actix_web::test]
async fn every_call_may_be_made_on_a_task_of_any_runtime() {
    fn sendable<F: Future + Send>(future: F) -> F {
        future
    }
    let rig = rig(policy()).await;
    let admin = Admin::of(&rig.idempotency);
    assert_eq!(rig.post("/plain").key("a").body("x").answer().await.status, 201);
    let scope = Scope::request("POST /plain");
    let entry = sendable(admin.look(&scope, "a")).await.unwrap().unwrap();
    assert_eq!(sendable(admin.find(&entry.id())).await.unwrap().len(), 1);
    assert!(sendable(admin.answer(&entry)).await.unwrap().is_some());
    assert!(sendable(admin.outstanding()).await.unwrap().entries.is_empty());
    assert_eq!(sendable(admin.numbers()).await.unwrap().outstanding, 0);
    assert_eq!(sendable(admin.force_release(&entry)).await.unwrap(), Acted::Unfit(State::Completed));
    assert_eq!(sendable(admin.erase(None, "nobody")).await.unwrap().gone, 0);
}

// --- expiring and erasing -------------------------------------------------------------------------------------

#[actix_web::test]
async fn after_a_key_was_expired_a_retry_is_a_first_request() {
    for policy in [policy(), policy().retain_forever()] {
        let rig = rig(policy).await;
        let admin = Admin::of(&rig.idempotency);
        let first = rig.post("/tx").key("a").body("x").answer().await;
        first.assert_replayed_by(&rig.post("/tx").key("a").body("x").answer().await);
        let completed = seen(&admin, "a").await;
        assert!(matches!(admin.release(&completed).await.unwrap(), Acted::Unfit(State::Completed)));
        assert_eq!(admin.expire(&completed).await.unwrap(), Acted::Done);
        let expired = seen(&admin, "a").await;
        assert_eq!((expired.state, expired.expires_in), (State::Expired, Some(Duration::ZERO)));
        // With another body, even.
        let anew = rig.post("/tx").key("a").body("y").answer().await;
        assert_eq!((anew.status.as_u16(), anew.is_replay()), (201, false));
        anew.assert_replayed_by(&rig.post("/tx").key("a").body("y").answer().await);
        // The key that was seen is another one now.
        assert_eq!(admin.expire(&completed).await.unwrap(), Acted::Changed);
        assert!(admin.answer(&completed).await.unwrap().is_none());
        assert_eq!(admin.expire(&seen(&admin, "a").await).await.unwrap(), Acted::Done);
        assert_eq!(Sweeper::new(rig.db.pool(1)).sweep_once().await.unwrap(), 1);
        assert_eq!(rig.db.keys().await, 0);
    }
}

#[actix_web::test]
async fn all_keys_of_a_principal_are_erased_but_those_that_run() {
    for indexed in [false, true] {
        let rig = rig(of_somebody()).await;
        let admin = Admin::of(&rig.idempotency);
        if indexed {
            migrations::run_pending(&rig.db.url, migrations::PRINCIPAL_INDEX).await.unwrap();
        }
        let ask = |path: &str, key: &str, user: &str| rig.post(path).key(key).header("x-user", user).body("x");
        for (key, user) in [("a", "alice"), ("b", "bob")] {
            assert_eq!(ask("/steps", key, user).answer().await.status, 201);
        }
        let in_acme = || ask("/tx", "a", "alice").header("x-tenant", "acme").answer();
        assert_eq!(in_acme().await.status, 201);
        // More than a batch, and more than a stretch.
        let many = i64::from(STRETCH) + i64::from(ERASE_BATCH);
        rig.db.run(&format!("{} AND tenant IS NULL", more_rows("a", many))).await;
        let running = spawn(ask("/tx", "running", "alice").held().answer());
        rig.gate.entered(1).await;

        let erased = admin.erase(None, "alice").await.unwrap();
        assert_eq!((erased.gone, erased.left), (many.unsigned_abs() + 1, 1));
        assert_eq!(rig.db.keys().await, 3);
        assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_steps").await, 1);
        assert!(in_acme().await.is_replay());
        assert!(ask("/steps", "b", "bob").answer().await.is_replay());
        assert!(!ask("/steps", "a", "alice").answer().await.is_replay());

        rig.gate.open(1);
        let first = running.await.unwrap();
        first.assert_replayed_by(&ask("/tx", "running", "alice").answer().await);
        let erased = admin.erase(None, "alice").await.unwrap();
        assert_eq!((erased.gone, erased.left), (2, 0));
        let erased = admin.erase(Some("acme"), "alice").await.unwrap();
        assert_eq!((erased.gone, erased.left, rig.db.keys().await), (1, 0, 1));
    }
}

#[actix_web::test]
async fn keys_that_come_and_go_while_they_are_erased_stay_whole() {
    let rig = rig(of_somebody()).await;
    let admin = Admin::postgres(rig.db.serializable_pool(2));
    let requests = join_all((0..60).map(|n| {
        let path = if n % 2 == 0 { "/tx" } else { "/steps" };
        let ask = rig.post(path).key(&format!("k{n}")).header("x-user", "alice").body(format!("t{n}"));
        async move { ask.answer().await.status.as_u16() }
    }));
    let erasing = async {
        let mut gone = 0;
        for _ in 0..20 {
            gone += admin.erase(None, "alice").await.unwrap().gone;
        }
        gone
    };
    let (statuses, gone) = join(requests, erasing).await;
    assert!(statuses.iter().all(|status| *status == 201), "{statuses:?}");
    assert_eq!(rig.db.all_effects().await, 60);
    assert_eq!(i64::try_from(gone).unwrap() + rig.db.keys().await, 60);
    let last = admin.erase(None, "alice").await.unwrap();
    assert_eq!((last.left, rig.db.keys().await), (0, 0));
}

// --- rights ---------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn who_may_read_may_look_and_who_may_do_what_the_service_does_may_act() {
    let rig = rig(of_somebody()).await;
    let ask = || rig.post("/steps").key("a").header("x-user", "alice").body("x").answer();
    assert_eq!(ask().await.status, 201);
    rig.db.lapse("a").await;
    let reader = rig.db.role().await;
    rig.db.run(&format!("GRANT SELECT ON idempotency_keys TO {}", reader.name)).await;
    let looker = Admin::postgres(crate::support::db::pool(&reader.url, 1));
    let lapsed = seen(&looker, "a").await;
    assert_eq!(looker.find(&lapsed.id()).await.unwrap().len(), 1);
    assert_eq!(looker.outstanding().await.unwrap().entries.len(), 1);
    assert_eq!(looker.numbers().await.unwrap().outstanding, 1);
    assert!(looker.answer(&lapsed).await.unwrap().is_none());
    assert_eq!(looker.release(&lapsed).await.unwrap_err().kind(), ErrorKind::Database);
    assert_eq!(looker.erase(None, "alice").await.unwrap_err().kind(), ErrorKind::Database);
    assert_eq!(rig.db.state("a").await.as_deref(), Some("outstanding"));

    let service = rig.db.service_role().await;
    let admin = Admin::postgres(crate::support::db::pool(&service.url, 1));
    assert_eq!(admin.release(&lapsed).await.unwrap(), Acted::Done);
    assert_eq!(ask().await.status, 201);
    assert_eq!(admin.expire(&seen(&admin, "a").await).await.unwrap(), Acted::Done);
    // Steps go with their key: that is the table's own rule, and needs no right.
    assert_eq!(admin.erase(None, "alice").await.unwrap().gone, 1);
    assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_steps").await, 0);
}
