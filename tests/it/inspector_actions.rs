//! What is done through the inspector is done to the attempt that was seen, once, and by nobody else's page.

use std::{collections::BTreeMap, time::Duration};

use actix_idempotency::{IdemTx, Idempotency, Inspector, PgPool, Policy};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    rt::{spawn, time::sleep},
    web::{self, Data, ServiceConfig},
};
use diesel_async::SimpleAsyncConnection;
use futures_util::{FutureExt, future::join};

use crate::support::{
    app::{self, created, effect_in, order},
    client::{Raw, RequestExt},
    db::Db,
    eventually,
    forms::FormExt,
    gate::Gate,
    log,
    operator::Operator,
    repeat,
    rig::Rig,
};

/// The effect, the gate, and one commit with the answer. `tag` is the body.
async fn in_tx(mut tx: IdemTx, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    let id = effect_in(&mut tx, &tag).await?;
    gate.pass().await;
    Ok(created(id))
}

async fn rig(policy: Policy) -> (Rig, Operator) {
    let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        config.service(Inspector::new(idempotency).protected_elsewhere().scope("/idempotency"));
        config.service(web::resource("/tx").wrap(idempotency.clone()).route(web::post().to(in_tx)));
        app::routes(config, idempotency);
    };
    // Above that a running IdemTx holds its row, and a forced release finds it locked.
    let rig = Rig::builder().policy(policy).pool_size(8).database(Db::read_committed().await).serve(routes).await;
    let operator = Operator::at(rig.server.url("/idempotency"));
    (rig, operator)
}

async fn ordered(rig: &Rig, key: &str) -> reqwest::StatusCode {
    rig.post("/orders").key(key).json(&order("x")).answer().await.status
}

#[actix_web::test]
async fn a_lapsed_key_is_released_and_the_next_retry_runs() {
    log::listen();
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    let key = "inspector-released";
    ordered(&rig, key).await;
    rig.db.lapse(key).await;
    let id = operator.id(key).await;
    assert_eq!(operator.json(&format!("key.json?id={id}")).await["actions"], serde_json::json!(["release"]));
    let question = operator.page(&format!("release?id={id}")).await.text();
    assert!(question.contains("The next retry of the same request runs") && question.contains("may do it again"));
    let told = operator.act("release", &id).await.text();
    assert!(told.contains("Released: the next retry runs.") && told.contains("released"), "{told}");
    assert_eq!((ordered(&rig, key).await.as_u16(), rig.db.effects("x").await), (201, 2));
    assert_eq!(log::count(&rig.db.id(key).await, "released-by-hand"), 1);
}

#[actix_web::test]
async fn a_completed_key_is_expired_and_the_next_request_is_a_first_one() {
    log::listen();
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    let key = "inspector-expired";
    ordered(&rig, key).await;
    let id = operator.id(key).await;
    // Those for other states ask nothing that could be confirmed.
    for action in ["release", "force-release"] {
        let page = operator.page(&format!("{action}?id={id}")).await.text();
        assert!(page.contains("this is not for a key in its state") && !page.contains("<form"), "{page}");
    }
    let told = operator.act("expire", &id).await.text();
    assert!(told.contains("Expired: the next request with this key is a first one."), "{told}");
    let other = rig.post("/orders").key(key).json(&order("other")).answer().await;
    assert_eq!((other.status.as_u16(), other.is_replay()), (201, false));
    assert_eq!(log::count(&rig.db.id(key).await, "expired-by-hand"), 1);
}

#[actix_web::test]
async fn all_keys_of_a_principal_are_erased_and_those_that_run_are_counted() {
    log::listen();
    let header = |request: &HttpRequest| request.headers().get("x-user")?.to_str().ok().map(str::to_owned);
    let (rig, operator) = rig(Policy::new().principal(header)).await;
    let user = "inspector & erased";
    let ask = |key: &str, user: &str| rig.post("/orders").key(key).header("x-user", user).json(&order("x"));
    for (key, user) in [("a", user), ("b", user), ("c", "somebody else")] {
        assert_eq!(ask(key, user).answer().await.status, 201);
    }
    let runs = spawn(rig.post("/held").key("d").header("x-user", user).body("x").answer());
    rig.gate.entered(1).await;
    let page = format!("erase?{}", serde_urlencoded::to_string([("principal", user)]).unwrap());
    let question = operator.page(&page).await.text();
    assert!(question.contains("It cannot be undone.") && question.contains("inspector &amp; erased"), "{question}");
    assert!([">a</a>", ">b</a>", ">d</a>"].iter().all(|key| question.contains(key)) && !question.contains(">c</a>"));
    let told = operator.confirm("erase", &operator.question(&page).await).await.text();
    assert!(told.contains("2 keys were erased; 1 are there still"), "{told}");
    assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_keys").await, 2);
    rig.gate.open(1);
    assert_eq!(runs.await.unwrap().status, 201);
    let erased = |line: &log::Line| line.get("event") == Some("erased") && line.get("gone") == Some("2");
    assert!(log::all().iter().any(|line| erased(line) && !format!("{line:?}").contains(user)));
}

/// A page is left open; meanwhile the key goes to somebody else, or comes to its end.
#[actix_web::test]
async fn a_page_that_is_out_of_date_changes_nothing_and_says_so() {
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    let changed = "Nothing was done: since you saw it, somebody has claimed, completed or released the key.";

    // Lapsed when it was seen; taken over since, and completed.
    ordered(&rig, "a").await;
    rig.db.lapse("a").await;
    let id = operator.id("a").await;
    let page = operator.question(&format!("release?id={id}")).await;
    let forced: BTreeMap<_, _> = page.clone();
    ordered(&rig, "a").await;
    for action in ["release", "force-release", "expire"] {
        let told = operator.confirm(action, &forced).await.text();
        assert!(told.contains(changed), "{action}: {told}");
        assert_eq!(rig.db.state("a").await.as_deref(), Some("completed"), "{action}");
    }

    // The first attempt was seen, the second one runs: it is not taken away.
    let first = spawn(rig.post("/held").key("b").body("x").answer());
    rig.gate.entered(1).await;
    let id = operator.id("b").await;
    let page = operator.question(&format!("force-release?id={id}")).await;
    let told = operator.confirm("force-release", &page).await.text();
    assert!(told.contains("the attempt that had the key stores nothing any more"), "{told}");
    let second = spawn(rig.post("/held").key("b").body("x").answer());
    rig.gate.entered(2).await;
    assert!(operator.confirm("force-release", &page).await.text().contains(changed));
    rig.gate.open(2);
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(second.status, 201);
    assert!(first.status == 201 || first.code() == "lease-lost" || first.code() == "outstanding", "{first:?}");

    // It has gone since.
    let page = operator.question(&format!("expire?id={id}")).await;
    rig.db.run("DELETE FROM idempotency_keys").await;
    let gone = operator.confirm("expire", &page).await;
    assert_eq!(gone.status, 404);

    // The owner's own token is never told.
    ordered(&rig, "c").await;
    let owner = rig.db.text("SELECT encode(owner, 'hex') AS value FROM idempotency_keys").await.unwrap();
    let id = operator.id("c").await;
    for page in ["key", "key.json", "expire"] {
        assert!(!operator.page(&format!("{page}?id={id}")).await.text().contains(&owner[..16]), "{page}");
    }
}

#[actix_web::test]
async fn a_row_that_somebody_holds_is_left_alone() {
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    ordered(&rig, "a").await;
    let id = operator.id("a").await;
    let mut holder = rig.db.connect().await;
    holder.batch_execute("BEGIN; SELECT FROM idempotency_keys FOR UPDATE").await.unwrap();
    let told = operator.act("expire", &id).await.text();
    assert!(told.contains("Nothing was done: at that moment somebody wrote the row"), "{told}");
    holder.batch_execute("COMMIT").await.unwrap();
    assert!(operator.act("expire", &id).await.text().contains("Expired:"));
}

/// The button is pressed at the moment at which the owner is done. One of the two has the key.
#[actix_web::test]
async fn of_an_owner_that_completes_and_a_button_that_is_pressed_one_wins() {
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    let (mut taken, mut completed) = (0, 0);
    for round in 0..repeat(200, 20) {
        let path = ["/held", "/tx"][round % 2];
        let (key, tag) = (format!("r{round}"), format!("t{round}"));
        let owner = spawn(rig.post(path).key(&key).body(tag.clone()).answer());
        rig.gate.entered(round + 1).await;
        let page = operator.question(&format!("force-release?id={}", operator.id(&key).await)).await;
        let let_go = async {
            rig.gate.open(1);
            owner.await.unwrap()
        };
        let press = operator.confirm("force-release", &page);
        let (answer, told) = match round {
            // Each of them is first for certain, on both paths.
            0 | 1 => {
                let told = press.await;
                (let_go.await, told)
            }
            2 | 3 => {
                let answer = let_go.await;
                (answer, press.await)
            }
            // From before the button to after it.
            _ => {
                let pause = sleep(Duration::from_micros(500 * (round as u64 / 2 % 10)));
                join(pause.then(|()| let_go), press).await
            }
        };
        let told = told.text();
        let state = rig.db.state(&key).await.unwrap();
        let effects = rig.db.effects(&tag).await;
        if told.contains("Released:") {
            taken += 1;
            assert_eq!((answer.code().as_str(), state.as_str()), ("lease-lost", "released"), "{path}: {told}");
            assert_eq!(effects, if path == "/tx" { 0 } else { 1 }, "{path}: what it wrote is rolled back");
        } else {
            completed += 1;
            assert!(told.contains("Nothing was done:"), "{told}");
            assert_eq!((answer.status.as_u16(), state.as_str(), effects), (201, "completed", 1), "{path}: {told}");
        }
    }
    assert!(taken > 0 && completed > 0, "both should have been seen: {taken} {completed}");
}

/// Whoever hangs up after the button leaves nothing half done, and the log knows of it.
#[actix_web::test]
async fn an_action_goes_on_where_its_operator_hangs_up() {
    log::listen();
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    let key = "inspector-hung-up";
    ordered(&rig, key).await;
    let id = operator.id(key).await;
    let seen = operator.question(&format!("expire?id={id}")).await["seen"].clone();
    // Until it is let go, the write waits for the table.
    let mut holder = rig.db.connect().await;
    holder.batch_execute("BEGIN; LOCK TABLE idempotency_keys IN SHARE MODE").await.unwrap();
    let mut raw = Raw::connect(rig.server.address).await;
    let body = format!("id={id}&seen={seen}");
    let head = "POST /idempotency/expire HTTP/1.1\r\nhost: x\r\nsec-fetch-site: same-origin\r\n\
                content-type: application/x-www-form-urlencoded";
    raw.send(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await.unwrap();
    eventually("it is under way", || rig.db.blocked("UPDATE idempotency_keys")).await;
    raw.reset();
    // Its request is gone, and its future with it, when the server answers another one on every worker.
    for _ in 0..8 {
        assert_eq!(operator.page("search").await.status, 200);
    }
    holder.batch_execute("COMMIT").await.unwrap();
    let short = rig.db.id(key).await;
    eventually("it is done and told", async || log::count(&short, "expired-by-hand") == 1).await;
}

// --- other sites ----------------------------------------------------------------------------------------------

#[actix_web::test]
async fn what_was_not_sent_from_a_page_of_its_own_does_nothing() {
    let (rig, operator) = rig(Policy::new().anonymous()).await;
    ordered(&rig, "a").await;
    let id = operator.id("a").await;
    let form = operator.question(&format!("expire?id={id}")).await;
    let form: Vec<_> = form.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let own = format!("http://{}", rig.server.address);
    let foreign: [&[(&str, &str)]; 9] = [
        &[],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site"), ("origin", &own)],
        &[("sec-fetch-site", "none")],
        &[("sec-fetch-site", "cross-site"), ("origin", &own)],
        &[("origin", "https://evil.example")],
        &[("origin", "null")],
        &[("origin", "http://127.0.0.1:1")],
        &[("referer", &own)],
    ];
    for headers in foreign {
        for action in ["expire", "release", "force-release", "erase"] {
            let post = operator.post(action).form(if action == "erase" { &[("principal", "a")] } else { &form });
            let post = headers.iter().fold(post, |post, (name, value)| post.header(*name, *value));
            let answer = post.answer().await;
            assert_eq!(answer.status, 403, "{action} {headers:?}");
            assert!(answer.text().contains("not sent from a page of the inspector"), "{headers:?}");
        }
    }
    // A GET never does anything.
    for action in ["expire", "release", "force-release"] {
        operator.page(&format!("{action}?id={id}&seen={}", form[1].1)).await;
    }
    assert_eq!(ordered(&rig, "a").await, 201);
    assert_eq!(rig.db.effects("x").await, 1, "the answer is still stored");
    let own_page = operator.post("expire").header("origin", own).form(&form).answer().await;
    assert_eq!(own_page.status, 303);
    assert!(own_page.header("location").unwrap().ends_with("&did=expire&came=done"), "{own_page:?}");
}
