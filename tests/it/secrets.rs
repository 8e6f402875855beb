//! One life of a service, from its start to its clean-up, and not one secret of it in the log, in `Debug`, or in a
//! refusal. Each secret begins with the same four letters.

use std::{collections::BTreeSet, num::NonZeroU32, time::Duration};

use actix_idempotency::{
    Admin, Completer, Handled, IdemKey, Idempotency, IdempotencyKey, Inbox, Inspector, Once, OnceError, Outcome,
    PgPool, Policy, PoolBuilder, Relay, ResponseSnapshot, Scope, Secret, Sweeper,
    admin::{Acted, Search},
    inbox::Message,
    outbox,
};
use actix_web::{HttpRequest, http::StatusCode, rt::spawn, web::ServiceConfig};
use diesel_async::{AsyncConnection, AsyncPgConnection};

use crate::support::{
    PATIENCE, app,
    client::{Answer, RequestExt},
    db::{Db, LAPSED, THREE_DAYS_LATER, server_url, with_database},
    eventually,
    forms::{self, Forms},
    log,
    operator::Operator,
    rig::Rig,
};

const SECRET: &str = "Hush";

/// All that has been said so far, by whatever test.
#[track_caller]
fn assert_unheard() {
    for line in log::all() {
        let text = format!("{line:?}");
        assert!(!text.contains(SECRET), "{text}");
    }
}

/// What a client is told that did not get its own answer.
#[derive(Default)]
struct Refusals(Vec<String>);

impl Refusals {
    #[track_caller]
    fn expect(&mut self, answer: &Answer, status: u16) {
        assert_eq!(answer.status, status, "{}", answer.text());
        self.0.push(format!("{status} {:?} {}", answer.headers, answer.text()));
    }
}

fn tenant(_: &HttpRequest) -> Option<String> {
    Some("HushTenant".into())
}

/// Keys, from the header: a first request, its repeats, those that are refused, those that fail, and what the people who
/// run the service do about them.
async fn keys(refusals: &mut Refusals) -> Vec<String> {
    let policy =
        || Policy::new().tenant(tenant).fingerprint_secrets([Secret::new(b"HushFingerprintSecret-of-32-bytes")]);
    let rig = Rig::with(policy().store_timeout(PATIENCE).require_key()).await;
    let sent = |path: &str, key: &str, body: &str| {
        let request = rig.post(path).key(key).user("HushToken").header("x-own", "HushHeader");
        request.header("x-request-id", "told-by-intent").body(body.to_owned())
    };
    let send = async |path: &str, key: &str, body: &str| sent(path, key, body).answer().await;

    let first = send("/slow?ms=0&note=HushQuery", "HushKey", "HushBody").await;
    first.assert_replayed_by(&send("/slow?ms=0&note=HushQuery", "HushKey", "HushBody").await);
    refusals.expect(&send("/slow?ms=0", "HushKey", "HushOther").await, 422);
    refusals.expect(&send("/slow?ms=0", "HushKey,", "HushBody").await, 400);
    refusals.expect(&rig.post("/slow?ms=0").user("HushToken").body("HushBody").answer().await, 400);
    refusals.expect(&send("/flaky?mode=panic", "HushKey-panic", "HushBody").await, 500);
    let held = spawn(sent("/held", "HushKey-held", "HushBody").answer());
    rig.gate.entered(1).await;
    refusals.expect(&send("/held", "HushKey-held", "HushBody").await, 409);
    // Taken away, by hand.
    let admin = Admin::of(&rig.idempotency);
    let found = admin.search(&Search::new().key("HushKey-held")).await.unwrap();
    let seen = &found.entries[0];
    assert_eq!(seen.key, "HushKey-held", "people who look may see it");
    let mut shown = vec![format!("{found:?}"), format!("{admin:?}"), format!("{:?}", Search::new().key("HushKey"))];
    assert!(matches!(admin.release(seen).await.unwrap(), Acted::Live { .. }));
    assert_eq!(admin.force_release(seen).await.unwrap(), Acted::Done);
    rig.gate.open(1);
    refusals.expect(&held.await.unwrap(), 409);
    // A process that died, and the next attempt.
    rig.db.run(LAPSED).await;
    assert_eq!(send("/slow?ms=0&note=HushQuery", "HushKey", "HushBody").await.status, 201);
    // The store refuses a claim and an answer; in its own log it shows the whole row.
    rig.db
        .run(
            "ALTER TABLE idempotency_keys ADD CONSTRAINT hushed_claim CHECK (key <> 'HushKey-claim'), \
             ADD CONSTRAINT hushed_answer CHECK (key <> 'HushKey-answer' OR status IS NULL)",
        )
        .await;
    refusals.expect(&send("/slow?ms=0", "HushKey-claim", "HushBody").await, 503);
    assert_eq!(send("/slow?ms=0", "HushKey-answer", "HushBody").await.status, 201);
    let id = rig.db.id("HushKey-answer").await;
    eventually("it has given up", async || log::count(&id, "completion-lost") == 1).await;
    assert_eq!(log::count(&id, "completion-retried"), 1);

    let seen = admin.search(&Search::new().key("HushKey")).await.unwrap().entries.remove(0);
    let answer = admin.answer(&seen).await.unwrap().unwrap();
    shown.push(format!("{answer:?} {:?}", admin.numbers().await.unwrap()));
    assert_eq!(admin.expire(&seen).await.unwrap(), Acted::Done);
    let principal = seen.principal.clone().unwrap();
    shown.push(format!("{:?}", admin.erase(Some("HushTenant"), &principal).await.unwrap()));
    rig.db.run(THREE_DAYS_LATER).await;
    Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap();
    shown.push(format!("{:?} {:?} {:?}", rig.idempotency, policy(), rig.idempotency.check().await.unwrap()));
    let scope = Scope::request("POST /slow").for_principal("HushPrincipal").for_tenant("HushTenant");
    shown.push(format!("{scope:?} {:?}", Secret::new(b"HushFingerprintSecret-of-32-bytes")));
    let key = IdempotencyKey::try_from("HushKey").unwrap();
    shown.push(format!("{key:?} {:?}", ResponseSnapshot::new(StatusCode::OK).with_body("HushAnswer")));
    shown
}

/// Form tokens: page, submit, repeat, another's, a forged one.
async fn a_form(refusals: &mut Refusals) -> Vec<String> {
    let rig = forms::rig(Policy::new()).await;
    let token = rig.token_of("HushUser", "order").await;
    let submit = async |user: &str, token: &str, sku: &str| {
        let fields = [("form_token", token), ("sku", sku)];
        forms::FormExt::form(rig.post("/order").header("x-user", user), &fields).answer().await
    };
    assert_eq!(submit("HushUser", &token, "HushSku").await.status, 201);
    assert!(submit("HushUser", &token, "HushSku").await.is_replay());
    refusals.expect(&submit("HushUser", &token, "HushOther").await, 409);
    refusals.expect(&submit("HushElse", &token, "HushSku").await, 403);
    refusals.expect(&submit("HushUser", "HushForged", "HushSku").await, 400);
    // The right form, and another signature.
    let end = if token.ends_with('A') { "B" } else { "A" };
    let forged = format!("{}{end}", &token[..token.len() - 1]);
    assert!((400..404).contains(&submit("HushUser", &forged, "HushSku").await.status.as_u16()));
    // What stands in a token is not the word above.
    for line in log::all() {
        assert!(!format!("{line:?}").contains(&token), "{line:?}");
    }
    assert!(refusals.0.iter().all(|text| !text.contains(&token)));
    vec![format!("{:?}", forms::tokens(&[1]))]
}

/// Work without a request, work that nobody retries, and messages in both directions.
async fn work_and_messages() -> Vec<String> {
    let db = Db::new().await;
    let pool = db.pool(5);
    let once = Once::postgres(pool.clone());
    let mut shown = vec![format!("{once:?}")];
    let run = async |key: &str, input: &str, fails: bool| {
        once.run(Scope::once("letters").for_principal("HushPrincipal"), key, input, async move |_: IdemKey| {
            if fails { Err("HushFailure".to_owned()) } else { Ok("HushResult".to_owned()) }
        })
        .await
    };
    assert!(matches!(run("HushOnce", "HushInput", false).await, Ok(Outcome::Ran(_))));
    assert!(matches!(run("HushOnce", "HushInput", false).await, Ok(Outcome::Replayed(_))));
    let reused = run("HushOnce", "HushOther", false).await.unwrap_err();
    shown.push(format!("{reused:?} {reused}"));
    assert!(matches!(run("HushOnce-fails", "HushInput", true).await, Err(OnceError::Failed(_))));
    let invalid = run("Hush,Once", "HushInput", false).await.unwrap_err();
    shown.push(format!("{invalid:?} {invalid}"));
    db.run(LAPSED).await;
    let letters = Completer::of_work(&once, "letters", async |key: IdemKey| {
        assert_eq!(key.key().as_str().get(..4), Some(SECRET));
        Err::<String, _>("HushFailure".to_owned())
    })
    .grace(Duration::ZERO)
    .max_attempts(NonZeroU32::new(2).unwrap());
    letters.complete_once().await.unwrap();
    shown.push(format!("{letters:?}"));

    let mut conn = db.connect().await;
    let inbox = Inbox::new("letters").max_attempts(1);
    let message = |content: &'static str| Message::try_from("HushMessage").unwrap().content(content);
    shown.push(format!("{:?} {inbox:?}", message("HushContent")));
    let handle = async |conn: &mut AsyncPgConnection, id: &str, fails: bool| {
        let work = async |_: &mut AsyncPgConnection| match fails {
            true => Err::<(), Box<dyn std::error::Error + Send + Sync>>("it has failed".into()),
            false => Ok(()),
        };
        inbox.handle(conn, Message::try_from(id).unwrap().content("HushContent"), work).await
    };
    assert_eq!(handle(&mut conn, "HushMessage", false).await.unwrap(), Handled::Handled(()));
    assert_eq!(handle(&mut conn, "HushMessage", false).await.unwrap(), Handled::Duplicate);
    let parked = handle(&mut conn, "HushMessage-fails", true).await.unwrap_err();
    assert!(parked.is_to_be_parked());
    shown.push(format!("{parked:?} {parked}"));
    let changed = inbox.receive(&mut conn, message("HushChanged")).await.unwrap_err();
    shown.push(format!("{changed:?} {changed}"));

    let publish = async |conn: &mut AsyncPgConnection, key: &str| {
        let publishing = async |conn: &mut AsyncPgConnection| {
            outbox::publish_in_order(conn, "letters", key, "HushPayload").await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        };
        conn.transaction(publishing).await
    };
    publish(&mut conn, "HushEventKey").await.unwrap();
    let relay = Relay::new(pool, async |event: outbox::Event| {
        assert_eq!(event.payload, b"HushPayload");
        Err::<(), _>(std::io::Error::other("nobody is there"))
    })
    .max_attempts(1);
    relay.relay_once().await.unwrap();
    shown.push(format!("{:?}", outbox::parked(&mut conn, 10).await.unwrap()));
    // The table refuses it, and tells the driver the whole row.
    db.run("ALTER TABLE idempotency_outbox ADD CONSTRAINT hushed CHECK (key <> 'HushRefused')").await;
    let refused = publish(&mut conn, "HushRefused").await.unwrap_err();
    shown.push(format!("{refused:?} {refused}"));
    shown
}

/// What people look for and do in the inspector, also where the store is gone.
async fn pages() -> Vec<String> {
    let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        config.service(Inspector::new(idempotency).protected_elsewhere().scope("/idempotency"));
        app::routes(config, idempotency);
    };
    let rig = Rig::builder().policy(Policy::new().tenant(tenant)).serve(routes).await;
    let operator = Operator::at(rig.server.url("/idempotency"));
    let sent = rig.post("/slow?ms=0").key("HushKey-looked-at").user("HushToken").body("HushBody").answer().await;
    assert_eq!(sent.status, 201);
    let id = operator.id("HushKey-looked-at").await;
    let key = operator.json(&format!("key.json?id={id}")).await;
    assert_eq!(key["key"], "HushKey-looked-at", "people who look may see it");
    let whose = [("principal", key["principal"].as_str().unwrap()), ("tenant", "HushTenant")];
    let erase = format!("erase?{}", serde_urlencoded::to_string(whose).unwrap());
    operator.act("expire", &id).await;
    operator.confirm("erase", &operator.question(&erase).await).await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO hidden").await;
    let gone = [format!("key?id={id}"), "search.json?key=HushKey-looked-at".to_owned(), "search?after=Hush".to_owned()];
    let mut shown = vec![format!("{:?}", Inspector::new(&rig.idempotency))];
    for page in gone {
        let told = operator.page(&page).await;
        assert!(told.status == 503 || told.status == 400, "{told:?}");
        shown.push(told.text());
    }
    shown
}

#[actix_web::test]
async fn the_life_of_a_service_tells_no_secret() {
    log::listen();
    let mut refusals = Refusals::default();
    let mut shown = keys(&mut refusals).await;
    shown.extend(a_form(&mut refusals).await);
    shown.extend(work_and_messages().await);
    shown.extend(pages().await);

    // A store that cannot be used, and one that can, by a password that is none of the log's business.
    let db = Db::new().await;
    let role = db.service_role().await;
    db.run(&format!("ALTER ROLE {} PASSWORD 'HushPassword'", role.name)).await;
    let url = role.url.replace(":it@", ":HushPassword@");
    let good = Idempotency::postgres(PoolBuilder::new(&url).build().unwrap());
    shown.push(format!("{:?} {good:?}", good.check().await.unwrap()));
    db.run("ALTER TABLE idempotency_inbox SET UNLOGGED").await;
    good.check().await.unwrap();
    for url in [with_database(&url, "it_no_such_database"), "postgres://x:HushPassword@127.0.0.1:1/x".to_owned()] {
        let error = Idempotency::postgres(PoolBuilder::new(&url).build().unwrap()).check().await.unwrap_err();
        shown.push(format!("{error:?} {error}"));
    }
    assert_ne!(url, role.url, "{}", server_url());

    assert_unheard();
    for text in shown.iter().chain(&refusals.0) {
        assert!(!text.contains(SECRET), "{text}");
    }
    // It was listening to all of that.
    let heard: BTreeSet<_> = log::all().iter().filter_map(|line| line.get("event").map(str::to_owned)).collect();
    for event in [
        "fresh",
        "replayed",
        "key-reused",
        "outstanding",
        "rejected",
        "panicked",
        "lease-lost",
        "taken-over",
        "force-released",
        "expired-by-hand",
        "erased",
        "store-unavailable",
        "completion-retried",
        "completion-lost",
        "swept",
        "given-up",
        "message-parked",
        "event-failed",
        "event-parked",
        "advice",
    ] {
        assert!(heard.contains(event), "{event} in {heard:?}");
    }
    assert!(log::all().iter().any(|line| line.get("request_id") == Some("told-by-intent")));
}
