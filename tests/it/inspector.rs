//! The inspector shows what is there, as it is, and to nobody else.

use std::{collections::BTreeMap, time::Duration};

use actix_idempotency::{
    Idempotency, Inspector, PgPool, Policy,
    admin::{DEFAULT_LIMIT, STRETCH, STRETCHES},
    migrations,
};
use actix_web::{
    HttpRequest, HttpResponse,
    guard::{self, GuardContext},
    rt::spawn,
    web::{self, Data, ServiceConfig},
};
use serde_json::{Value, json};

use crate::{
    admin::more_rows,
    support::{
        app::{self, order},
        client::{Answer, RequestExt, client},
        db::Db,
        eventually,
        forms::FormExt,
        gate::Gate,
        operator::Operator,
        process::Setup,
        repeat,
        rig::Rig,
    },
};

const VIEWS: [&str; 6] = ["overview", "overview.json", "search", "search.json", "inspector.css", "inspector.js"];

/// Whose tenant and principal are headers.
fn of_somebody() -> Policy {
    let header =
        |name: &'static str| move |request: &HttpRequest| request.headers().get(name)?.to_str().ok().map(str::to_owned);
    Policy::new().principal(header("x-user")).tenant(header("x-tenant"))
}

/// The routes of `app.rs`, and the inspector that this makes.
async fn rig(policy: Policy, make: impl Fn(&Idempotency) -> Inspector + Clone + Send + 'static) -> (Rig, Operator) {
    let routes = move |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        config.service(make(idempotency).scope("/idempotency"));
        app::routes(config, idempotency);
    };
    let rig = Rig::builder().policy(policy).serve(routes).await;
    let operator = Operator::at(rig.server.url("/idempotency"));
    (rig, operator)
}

async fn open_rig(policy: Policy) -> (Rig, Operator) {
    rig(policy, |idempotency| Inspector::new(idempotency).protected_elsewhere()).await
}

fn keys(view: &Value) -> Vec<&str> {
    view["keys"].as_array().unwrap().iter().map(|key| key["key"].as_str().unwrap()).collect()
}

// --- figures --------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn every_figure_is_that_of_the_requests_just_sent() {
    let db = Db::new().await;
    // A process of its own: what it counts is what it is sent here.
    let server = Setup::new(&db.url).start();
    let operator = Operator::at(server.url("/idempotency"));
    let post = |path: &str, key: &str| client().post(server.url(path)).key(key);
    let buy = async |key: &str, sku: &str| post("/orders", key).json(&order(sku)).answer().await.status.as_u16();

    let before = operator.json("overview.json").await;
    assert_eq!((&before["process"]["id"], &before["process"]["held"]), (&json!(server.id()), &json!(0)));
    assert_eq!((&before["sweeper"]["state"], &before["sweeper"]["last_ago_ms"]), (&json!("not-yet"), &json!(null)));
    assert_eq!((before["table"]["outstanding"].clone(), operator.events().await), (json!(0), BTreeMap::new()));

    for key in ["a", "b", "c"] {
        assert_eq!(buy(key, "x").await, 201);
    }
    assert_eq!((buy("a", "x").await, buy("a", "x").await, buy("a", "y").await), (201, 201, 422));
    for status in [503, 201] {
        assert_eq!(post("/flaky?mode=r503", "d").send().await.unwrap().status(), status);
    }

    // One that runs: a duplicate meets it, and its key is taken away.
    let slow = spawn(post("/slow?ms=4000", "slow").body("s").answer());
    eventually("it runs", async || db.state("slow").await.as_deref() == Some("outstanding")).await;
    assert_eq!(post("/slow?ms=4000", "slow").body("s").answer().await.code(), "outstanding");
    let overview = operator.json("overview.json").await;
    assert_eq!((&overview["process"]["held"], &overview["table"]["outstanding"]), (&json!(1), &json!(1)));
    assert_eq!(
        (keys(&overview["table"]), &overview["table"]["keys"][0]["state"]),
        (vec!["slow"], &json!("outstanding"))
    );
    operator.act("force-release", &operator.id("slow").await).await;
    assert_eq!(slow.await.unwrap().code(), "lease-lost");

    // One whose process has died, fifty minutes ago.
    db.lapse("b").await;
    db.run("UPDATE idempotency_keys SET created_at = created_at - interval '50 minutes' WHERE key = 'b'").await;
    let overview = operator.json("overview.json").await;
    assert_eq!((keys(&overview["table"]), &overview["table"]["keys"][0]["state"]), (vec!["b"], &json!("lapsed")));
    let oldest = overview["table"]["oldest_outstanding_ms"].as_u64().unwrap();
    assert!((3_000_000..3_100_000).contains(&oldest), "{oldest}");
    assert_eq!(buy("b", "x").await, 201);
    db.age("c", "1 day").await;
    let overview = operator.json("overview.json").await;
    let expired = overview["table"]["oldest_expired_ms"].as_u64().unwrap();
    assert!((22 * 3_600_000..24 * 3_600_000).contains(&expired), "{expired}");
    assert_eq!(buy("c", "x").await, 201);

    let sent = [
        ("fresh", 5),
        ("replayed", 2),
        ("key-reused", 1),
        ("outstanding", 1),
        ("rejected", 3),
        ("released", 1),
        ("retried", 1),
        ("taken-over", 1),
        ("expired", 1),
        ("lease-lost", 1),
        ("force-released", 1),
    ];
    let sent: BTreeMap<String, u64> = sent.into_iter().map(|(event, total)| (event.to_owned(), total)).collect();
    assert_eq!(operator.events().await, sent);
    let after = operator.json("overview.json").await;
    assert_eq!((&after["process"]["held"], &after["table"]["outstanding"]), (&json!(0), &json!(0)));
    assert_eq!((&after["sweeper"]["state"], &after["sweeper"]["every_ms"]), (&json!("on"), &json!(60_000)));
    let bytes = db.number("SELECT pg_total_relation_size('idempotency_keys') AS value").await;
    assert_eq!(after["table"]["bytes"], json!(bytes));
    let statistics = "SELECT n_live_tup AS value FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'";
    eventually("the statistics have come", async || db.number(statistics).await == 5).await;
    assert_eq!(operator.json("overview.json").await["table"]["live_rows"], json!(5));

    let dead = "SELECT n_dead_tup AS value FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'";
    let figures = operator.json("overview.json").await;
    assert_eq!(figures["table"]["dead_rows"], json!(db.number(dead).await));
    // The look itself has given its connection back.
    let pool = &figures["process"];
    assert_eq!((&pool["connections_in_use"], pool["connections_idle"].as_u64() > Some(0)), (&json!(0), true), "{pool}");
    let counted = |view: &Value| view["process"]["counted_for_ms"].as_u64().unwrap();
    assert!(counted(&before) < counted(&figures));

    // The page has the same figures, without any script.
    let page = operator.page("overview").await.text();
    for (event, total) in [("replayed", 2), ("taken-over", 1), ("lease-lost", 1), ("store-unavailable", 0)] {
        let figure = page.split(&format!("id=\"event-{event}\"")).nth(1).unwrap().split("</figure>").next().unwrap();
        assert!(figure.contains(&format!("class=\"count\">{total}<")), "{event}: {figure}");
        let bars = figure.matches("<rect").count();
        assert!(if total == 0 { bars == 0 } else { (1..=total).contains(&bars) }, "{event}: {figure}");
    }
}

#[actix_web::test]
async fn the_sweepers_last_run_is_told() {
    let db = Db::new().await;
    let server = Setup { retention: Duration::from_secs(1), ..Setup::new(&db.url) }.start();
    let operator = Operator::at(server.url("/idempotency"));
    for key in ["a", "b"] {
        client().post(server.url("/orders")).key(key).json(&order("x")).answer().await;
    }
    eventually("both are swept", async || operator.json("overview.json").await["sweeper"]["rows"] == 2).await;
    assert_eq!(db.keys().await, 0);
    let sweeper = operator.json("overview.json").await["sweeper"].clone();
    assert_eq!((&sweeper["state"], &sweeper["every_ms"]), (&json!("on"), &json!(1000)));
    assert!(sweeper["last_ago_ms"].is_u64() && sweeper["last_rows"].is_u64(), "{sweeper}");
    assert!(operator.events().await["swept"] >= 1);

    let (rig, operator) =
        rig(Policy::new().anonymous(), |it| Inspector::new(&it.clone().without_sweeper()).protected_elsewhere()).await;
    rig.post("/orders").key("a").json(&order("x")).answer().await;
    assert_eq!(operator.json("overview.json").await["sweeper"]["state"], "off");
    assert!(operator.page("overview").await.text().contains("leaves expired rows to somebody else"));
}

// --- outstanding keys -----------------------------------------------------------------------------------------

#[actix_web::test]
async fn without_the_index_the_last_hour_is_listed_and_the_page_says_so() {
    let (rig, operator) = open_rig(Policy::new().anonymous()).await;
    for key in ["old", "lapsed"] {
        rig.post("/orders").key(key).json(&order("x")).answer().await;
        rig.db.lapse(key).await;
    }
    rig.db.age("old", "2 hours").await;
    let live = spawn(rig.post("/held").key("live").body("x").answer());
    rig.gate.entered(1).await;
    let listed = async || operator.json("overview.json").await["table"].clone();
    let table = listed().await;
    assert_eq!(
        (keys(&table), &table["is_indexed"], &table["outstanding"]),
        (vec!["lapsed", "live"], &json!(false), &json!(3))
    );
    let page = operator.page("overview").await.text();
    assert!(page.contains("claimed within the last hour") && page.contains("href=\"search?outstanding=on\""), "{page}");
    assert_eq!(keys(&operator.json("search.json?outstanding=on").await), ["old", "lapsed", "live"]);

    migrations::run_pending(&rig.db.url, migrations::OUTSTANDING_INDEX).await.unwrap();
    let table = listed().await;
    assert_eq!((keys(&table), &table["is_indexed"]), (vec!["old", "lapsed", "live"], &json!(true)));
    assert!(!operator.page("overview").await.text().contains("the last hour"));
    rig.gate.open(1);
    live.await.unwrap();
}

/// However large the table is. Rows are counted by the server, whatever plan it has chosen.
#[actix_web::test]
async fn a_look_at_a_large_table_without_the_index_is_bounded() {
    let (rig, operator) = open_rig(Policy::new().anonymous()).await;
    rig.post("/orders").key("seed").json(&order("x")).answer().await;
    let rows = repeat(1_000_000, 300_000) as i64;
    rig.db.run(&more_rows("seed", rows)).await;
    for key in ["early", "late"] {
        rig.post("/orders").key(key).json(&order("x")).answer().await;
        rig.db.lapse(key).await;
    }
    rig.db.run("VACUUM ANALYZE idempotency_keys").await;

    let read = "SELECT (seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint AS value FROM pg_stat_user_tables \
                WHERE relname = 'idempotency_keys'";
    // Those of the pool tell the server what they have read when they end.
    let hang_up = async || {
        let others = "datname = current_database() AND pid <> pg_backend_pid()";
        rig.db.run(&format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")).await;
        let gone = format!("(SELECT count(*) = 0 FROM pg_stat_activity WHERE {others})");
        eventually("they are gone", || rig.db.is(&gone)).await;
    };
    hang_up().await;
    let before = rig.db.number(read).await;
    // More often than the server makes a new plan for each of a statement's first executions.
    let looks = 8;
    for _ in 0..looks {
        let table = operator.json("overview.json").await["table"].clone();
        assert_eq!(
            (keys(&table), &table["is_indexed"], &table["is_whole"]),
            (vec!["early", "late"], &json!(false), &json!(false))
        );
    }
    assert!(operator.page("overview").await.text().contains("among the 10000 keys that expire last"));
    hang_up().await;
    let read = rig.db.number(read).await - before;
    // The list looks through one stretch, the figures through another and a thousand expired rows.
    let bound = i64::from(STRETCH) * 2 + 1000 + 10;
    assert!(read <= (looks + 1) * bound, "{read} rows for {looks} looks at {rows}");
    assert!(read > looks * i64::from(STRETCH), "the statistics should have come: {read}");
}

/// What a page has no room for is not passed over in silence.
#[actix_web::test]
async fn a_page_says_what_it_has_no_room_for() {
    let (rig, operator) = open_rig(of_somebody()).await;
    let ask = |key: &str| rig.post("/orders").key(key).header("x-user", "alice").json(&order("x"));
    ask("no-tenant").answer().await;
    ask("seed").header("x-tenant", "acme").answer().await;
    rig.db.run(&more_rows("seed", DEFAULT_LIMIT.into())).await;
    let found = operator.json("search.json?principal=alice").await;
    let shown = (keys(&found).len(), &found["is_whole"], &found["is_cut"]);
    assert_eq!(shown, (DEFAULT_LIMIT as usize, &json!(true), &json!(true)));
    assert!(operator.page("search?principal=alice").await.text().contains("there are more that fit"));
    let found = operator.json("search.json?principal=alice&key=seed").await;
    assert_eq!((keys(&found), &found["is_cut"]), (vec!["seed"], &json!(false)));

    // The question before all of them go is about those that would.
    let question = operator.page("erase?principal=alice").await.text();
    assert!(question.contains(">no-tenant</a>") && question.contains("All of them"), "{question}");
    assert!(!question.contains(">seed</a>"), "{question}");
    let question = operator.page("erase?principal=alice&tenant=acme").await.text();
    assert!(question.contains("Some of them") && !question.contains(">no-tenant</a>"), "{question}");
    assert!(operator.page("erase?principal=nobody").await.text().contains("There are none."));
}

// --- keys -----------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_search_finds_by_everything_that_a_key_has() {
    let (rig, operator) = open_rig(of_somebody()).await;
    for (key, user, tenant) in [("k1", "alice", "acme"), ("k2", "bob", "acme"), ("k3", "alice", "böse & co")] {
        let tenant = http_value(tenant);
        let ask = rig.post("/orders").key(key).header("x-user", user).header("x-tenant", tenant);
        assert_eq!(ask.json(&order("x")).answer().await.status, 201);
    }
    rig.post("/refunds").key("k4").header("x-user", "bob").json(&order("x")).answer().await;
    let found = async |query: &str| {
        let found = operator.json(&format!("search.json?{query}")).await;
        let mut keys: Vec<String> = keys(&found).into_iter().map(str::to_owned).collect();
        keys.sort();
        // The page says the same.
        let page = operator.page(&format!("search?{query}")).await.text();
        for key in ["k1", "k2", "k3", "k4"] {
            let linked = page.contains(&format!("\">{key}</a>"));
            assert_eq!(linked, keys.iter().any(|found| found == key), "{query}: {key}");
        }
        keys
    };
    assert_eq!(found("").await, ["k1", "k2", "k3", "k4"]);
    assert_eq!(found("key=k2").await, ["k2"]);
    assert_eq!(found("principal=alice").await, ["k1", "k3"]);
    assert_eq!(found("tenant=acme&principal=alice").await, ["k1"]);
    assert_eq!(found("resource=POST+%2Frefunds").await, ["k4"]);
    assert_eq!(found("domain=http&tenant=acme").await, ["k1", "k2"]);
    assert_eq!(found("state=completed").await.len(), 4);
    rig.db.lapse("k3").await;
    rig.db
        .run("UPDATE idempotency_keys SET created_at = '2026-01-31 08:00Z', expires_at = NULL WHERE key = 'k1'")
        .await;
    assert_eq!(found("state=lapsed").await, ["k3"]);
    assert_eq!(found("state=lapsed&outstanding=on").await, ["k3"]);
    assert!(found("state=outstanding").await.is_empty());
    assert_eq!(found("status=2xx&principal=bob").await, ["k2", "k4"]);
    assert!(found("status=400-599").await.is_empty());
    assert_eq!(found("to=2026-01-31T08:01").await, ["k1"]);
    assert!(found("to=2026-01-31T08:00").await.is_empty());
    assert_eq!(found("from=2026-01-31T08:00&to=2026-02-01T00:00:00").await, ["k1"]);
    assert_eq!(found("from=2026-01-31T08:00:01").await, ["k2", "k3", "k4"]);
    rig.db.age("k2", "2 days").await;
    assert_eq!(found("state=expired").await, ["k2"]);
    assert!(found("domain=once").await.is_empty() && found("outstanding=on&domain=token").await.is_empty());
    let id = operator.id("k1").await;
    assert_eq!(found(&format!("id={}", &id[..12])).await, ["k1"]);
    assert_eq!(found(&format!("id={}", id.to_uppercase())).await, ["k1"]);
}

/// As a header may carry what is not ASCII: hyper's client refuses `str`, not bytes.
fn http_value(text: &str) -> reqwest::header::HeaderValue {
    if text.is_ascii() {
        return text.parse().unwrap();
    }
    // `to_str` of the policy refuses it, and there is no tenant.
    reqwest::header::HeaderValue::from_bytes(text.as_bytes()).unwrap()
}

/// A walk by id stops before this one is reached. Whoever says all that a key belongs to finds it.
#[actix_web::test]
async fn a_key_whose_scope_is_said_is_found_in_a_table_of_any_size() {
    let (rig, operator) = open_rig(Policy::new().anonymous()).await;
    rig.post("/orders").key("seed").json(&order("x")).answer().await;
    // Their ids come before its own, whatever that is.
    let first = "int8send(0) || int8send(n) || substr(sha256(n::text::bytea), 17)";
    let rows = more_rows("seed", i64::from(STRETCH * STRETCHES) + 500);
    rig.db.run(&rows.replace("sha256(n::text::bytea)", first)).await;
    let found = operator.json("search.json?key=seed&resource=POST+%2Forders").await;
    assert_eq!((keys(&found), &found["is_whole"]), (vec!["seed"], &json!(false)));
    let mut seen = 0;
    let mut page = operator.json("search.json?key=seed").await;
    loop {
        seen += keys(&page).len();
        let Some(rest) = page["rest"].as_str() else { break };
        page = operator.json(&format!("search.json?key=seed&after={rest}")).await;
    }
    assert_eq!((seen, &page["is_whole"]), (1, &json!(true)));
}

#[actix_web::test]
async fn one_key_tells_its_life_and_its_twin_the_same() {
    let (rig, operator) = open_rig(of_somebody()).await;
    let flaky = || {
        let flaky = rig.post("/flaky?mode=r503").key("life").header("x-request-id", "req-7");
        flaky.header("x-user", "alice").header("x-tenant", "acme")
    };
    assert_eq!(flaky().answer().await.status, 503);
    let id = operator.id("life").await;
    let life = async || operator.json(&format!("key.json?id={id}")).await;
    let released = life().await;
    assert_eq!(
        json!([released["state"], released["attempt"], released["status"], released["answer"], released["actions"]]),
        json!(["released", 1, 503, null, []])
    );
    assert_eq!(released["steps"], json!([]));
    rig.db
        .run(
            "INSERT INTO idempotency_steps SELECT id, seed, step, '\"1\"', now() - interval '1 minute' * place \
             FROM idempotency_keys, unnest(ARRAY['mail', 'charge']) WITH ORDINALITY AS t (step, place)",
        )
        .await;
    let half = life().await;
    let names: Vec<_> = half["steps"].as_array().unwrap().iter().map(|step| step["name"].as_str().unwrap()).collect();
    assert_eq!((names, &half["steps"][0]["result_size"]), (vec!["charge", "mail"], &json!(3)));
    let page = operator.page(&format!("key?id={id}")).await.text();
    for told in ["Steps that are done", "charge", "mail", "2 min ago", "<dt>last status</dt><dd>503</dd>"] {
        assert!(page.contains(told), "{told}: {page}");
    }
    assert_eq!(flaky().answer().await.status, 201);
    let completed = life().await;
    assert_eq!(
        json!([completed["state"], completed["attempt"], completed["status"], completed["actions"]]),
        json!(["completed", 2, 201, ["expire"]])
    );
    assert_eq!(
        json!([
            completed["key"],
            completed["principal"],
            completed["tenant"],
            completed["resource"],
            completed["domain"],
            completed["request_id"]
        ]),
        json!(["life", "alice", "acme", "POST /flaky", "http", "req-7"])
    );
    let size = rig.db.number("SELECT octet_length(body)::bigint AS value FROM idempotency_keys").await;
    assert_eq!(completed["answer"]["body_size"], size);
    for field in ["created_at_ms", "completed_at_ms", "leased_until_ms", "expires_in_ms"] {
        assert!(completed[field].is_u64(), "{field}: {completed}");
    }
    let page = operator.page(&format!("key?id={id}")).await.text();
    for told in [
        "life",
        "alice",
        "acme",
        "POST /flaky",
        "req-7",
        "completed",
        "location",
        "etag",
        &format!("<b>{size}</b> bytes"),
        &id,
    ] {
        assert!(page.contains(told), "{told}: {page}");
    }
}

#[actix_web::test]
async fn bodies_and_secret_headers_are_hidden_unless_the_closure_allows() {
    let secret = json!({"status": 201, "headers": [["x-api-key", "sesame"], ["Location", "/a?signature=sesame"],
        ["content-type", "text/plain"]], "body": b"sesame <b>".to_vec()});
    let show = |idempotency: &Idempotency| {
        Inspector::new(idempotency).protected_elsewhere().show_bodies(|entry| entry.key == "shown")
    };
    let (rig, operator) = rig(Policy::new().anonymous(), show).await;
    for key in ["shown", "hidden", "binary"] {
        let body = if key == "binary" { json!({"status": 200, "body": [255, 0, 254]}) } else { secret.clone() };
        rig.post("/echo").key(key).json(&body).answer().await;
    }
    let views = async |key: &str| {
        let id = operator.id(key).await;
        let page = operator.page(&format!("key?id={id}")).await.text();
        (page, operator.json(&format!("key.json?id={id}")).await["answer"].clone())
    };
    let value = |answer: &Value, name: &str| {
        let headers = answer["headers"].as_array().unwrap();
        headers.iter().find(|header| header["name"] == name).unwrap()["value"].clone()
    };
    let (page, answer) = views("hidden").await;
    assert!(!page.contains("sesame") && !answer.to_string().contains("sesame"), "{page} {answer}");
    assert_eq!((value(&answer, "x-api-key"), value(&answer, "location")), (json!(null), json!(null)));
    assert_eq!(
        (value(&answer, "content-type"), &answer["body"], &answer["body_size"]),
        (json!("text/plain"), &json!(null), &json!(10))
    );
    let (page, answer) = views("shown").await;
    assert!(page.contains("sesame &lt;b&gt;") && page.contains("/a?signature=sesame"), "{page}");
    assert_eq!((value(&answer, "x-api-key"), &answer["body"]), (json!("sesame"), &json!("sesame <b>")));
    let (page, answer) = views("binary").await;
    assert!(page.contains("<b>3</b> bytes") && answer["body"].is_null(), "{page}");
}

// --- access ---------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn whom_the_guard_refuses_finds_nothing_of_any_route() {
    let guarded = |idempotency: &Idempotency| {
        let knows = |context: &GuardContext<'_>| context.head().headers().contains_key("x-operator");
        Inspector::new(idempotency).guard(guard::fn_guard(knows)).guard(guard::Not(guard::Header("x-evil", "1")))
    };
    let (rig, operator) = rig(Policy::new().anonymous(), guarded).await;
    rig.post("/orders").key("guarded").json(&order("x")).answer().await;
    let found = operator.get("search.json?key=guarded").header("x-operator", "1").answer().await.json();
    let id = found["keys"][0]["id"].as_str().unwrap();
    let mut gets: Vec<String> =
        VIEWS.iter().chain(&["", "erase?principal=a", "nowhere"]).map(|page| page.to_string()).collect();
    gets.extend(["key", "key.json", "release", "force-release", "expire"].map(|page| format!("{page}?id={id}")));
    let nothing = |page: &str, answer: Answer| {
        assert_eq!((answer.status.as_u16(), answer.body.len()), (404, 0), "{page}");
        assert_eq!(answer.header("content-security-policy"), None, "{page}: nothing of it answers");
    };
    for page in &gets {
        nothing(page, operator.get(page).answer().await);
        nothing(page, operator.get(page).header("x-operator", "1").header("x-evil", "1").answer().await);
        let allowed = operator.get(page).header("x-operator", "1").answer().await;
        assert!(allowed.headers.contains_key("content-security-policy"), "{page}: {allowed:?}");
    }
    for action in ["release", "force-release", "expire", "erase"] {
        let form = [("id", id), ("seen", ""), ("principal", "a")];
        nothing(action, operator.post(action).header("sec-fetch-site", "same-origin").form(&form).answer().await);
    }
    assert_eq!(rig.db.state("guarded").await.as_deref(), Some("completed"));
}

#[actix_web::test]
#[should_panic(expected = "Add .guard(…) to the Inspector, or .protected_elsewhere()")]
async fn it_does_not_build_before_somebody_says_who_may_look() {
    let db = Db::new().await;
    let _ = Inspector::new(&Idempotency::postgres(db.pool(1))).scope("/idempotency");
}

#[actix_web::test]
#[should_panic(expected = "has no engine of its own")]
async fn there_is_no_inspector_without_an_engine() {
    let _ = Inspector::new(&Idempotency::from_app_data());
}

#[actix_web::test]
async fn pages_run_nothing_of_others_and_are_kept_nowhere() {
    let (rig, operator) = open_rig(Policy::new().anonymous()).await;
    rig.post("/orders").key("a").json(&order("x")).answer().await;
    let id = operator.id("a").await;
    let pages = [format!("key?id={id}"), format!("expire?id={id}"), "erase?principal=a".into(), "nowhere".into()];
    let all = VIEWS.iter().map(|page| page.to_string()).chain(pages).chain(["key.json?id=x".to_owned()]);
    for page in all {
        let answer = operator.page(&page).await;
        let policy = answer.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'") && policy.contains("form-action 'self'"), "{policy}");
        let headers = ["cache-control", "x-content-type-options", "referrer-policy"].map(|name| answer.header(name));
        assert_eq!(headers, [Some("no-store"), Some("nosniff"), Some("same-origin")], "{page}");
        if answer.header("content-type").is_some_and(|kind| kind.starts_with("text/html")) {
            let text = answer.text();
            assert_eq!(text.matches("<script").count(), 1, "{page}");
            assert!(text.contains("<script src=\"inspector.js\" defer></script>"), "{page}");
            assert!(!text.contains("style=") && !text.contains("<style") && !text.contains(" onclick"), "{page}");
        }
    }
}

// --- whatever is asked ----------------------------------------------------------------------------------------

#[actix_web::test]
async fn what_cannot_be_read_is_refused_without_a_word_of_sql() {
    let (_rig, operator) = open_rig(Policy::new().anonymous()).await;
    let unknown = format!("key?id={}", "0".repeat(64));
    let asked = [
        ("key", 400),
        ("key?id=", 400),
        ("key?id=xyz", 400),
        ("key?id=a&id=b", 400),
        (&unknown, 404),
        (&unknown.replace("key", "key.json"), 404),
        (&unknown.replace("key", "expire"), 404),
        ("key.json?id=%00", 400),
        ("key?id=%ff%fe", 400),
        ("search?key=%00", 400),
        ("search.json?principal=a%00b", 400),
        ("search?domain=';drop table", 400),
        ("search?id=xyz", 400),
        ("search.json?after=zz", 400),
        ("search?after=00", 400),
        ("search?left=-1", 400),
        ("search?state=asleep", 400),
        ("search?status=teapot", 400),
        ("search?status=5xx-", 400),
        ("search?from=yesterday", 400),
        ("search.json?to=2026-02-30T99:00", 400),
        ("search?key=a&key=b", 400),
        ("search?key=%27%3B+DROP+TABLE+idempotency_keys%3B--", 200),
        ("search?key=%ff&tenant=%0a%0d", 200),
        ("erase", 400),
        ("erase?principal=", 400),
        ("erase?principal=a&tenant=%00", 400),
        ("nowhere", 404),
        ("nowhere.json", 404),
    ];
    for (page, status) in asked {
        let answer = operator.page(page).await;
        let text = answer.text();
        assert_eq!(answer.status.as_u16(), status, "{page}: {text}");
        assert!(
            !["SELECT", "column", "syntax", "sequence", "panicked"].iter().any(|word| text.contains(word)),
            "{text}"
        );
        if page.contains(".json") {
            assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{page}");
            assert_eq!(answer.json()["status"], status, "{page}");
        }
    }
    for (body, kind) in [("", "application/x-www-form-urlencoded"), ("{}", "application/json"), ("id=a", "text/plain")]
    {
        let sent =
            operator.post("release").header("sec-fetch-site", "same-origin").header("content-type", kind).body(body);
        assert_eq!(sent.answer().await.status, 400, "{kind}");
    }
    let long = format!("id=a&seen={}", "x".repeat(1 << 20));
    let sent = operator.post("release").header("sec-fetch-site", "same-origin");
    let sent = sent.header("content-type", "application/x-www-form-urlencoded").body(long).answer().await;
    assert_eq!(sent.status, 400);
}

#[actix_web::test]
async fn hostile_names_are_text() {
    let (rig, operator) = open_rig(of_somebody()).await;
    let key = "<script>alert(1)</script>&'";
    let user = "\"><img/src=x>";
    let tenant = "</title><b>";
    let ask = rig.post("/orders").key(key).header("x-user", user).header("x-tenant", tenant);
    assert_eq!(ask.json(&order("x")).answer().await.status, 201);
    rig.db.run("UPDATE idempotency_keys SET resource = E'\\u202e<i>☃\\u2028'").await;
    let id = operator.json("search.json").await["keys"][0]["id"].as_str().unwrap().to_owned();
    let twin = operator.json(&format!("key.json?id={id}")).await;
    assert_eq!((&twin["key"], &twin["principal"], &twin["tenant"]), (&json!(key), &json!(user), &json!(tenant)));
    let erase = serde_urlencoded::to_string([("principal", user), ("tenant", tenant)]).unwrap();
    for page in [
        format!("key?id={id}"),
        format!("expire?id={id}"),
        "search".into(),
        format!("erase?{erase}"),
        format!("search?{erase}"),
    ] {
        let text = operator.page(&page).await.text();
        for raw in ["<script>alert", "<img", "</title><b>", "<i>☃"] {
            assert!(!text.contains(raw), "{page}: {raw}: {text}");
        }
        assert!(text.contains("&lt;script&gt;alert(1)&lt;/script&gt;&amp;'"), "{page}: {text}");
    }
    // The link to their owner leads to their owner.
    let page = operator.page(&format!("key?id={id}")).await.text();
    let link = page.split("href=\"erase?").nth(1).unwrap().split('"').next().unwrap().replace("&amp;", "&");
    let form = operator.question(&format!("erase?{link}")).await;
    assert_eq!((form["principal"].as_str(), form["tenant"].as_str()), (user, tenant));
}

/// A name that looks like another one, or turns what stands around it, shows what it is made of.
#[actix_web::test]
async fn what_cannot_be_seen_in_a_name_is_named() {
    let (rig, operator) = open_rig(of_somebody()).await;
    let ask = rig.post("/orders").key("k").header("x-user", "alice").header("x-tenant", "acme");
    assert_eq!(ask.json(&order("x")).answer().await.status, 201);
    rig.db
        .run(
            "UPDATE idempotency_keys SET key = E'key\\u202e1', resource = E'res\\u200bource', principal = E'al\\u2066ice', \
             tenant = E'ac\\ufeffme', request_id = E'req\\u061c7', header_names = '{content-type}', \
             header_values = ARRAY[convert_to(E'text\\u200dplain', 'UTF8')]; \
             INSERT INTO idempotency_steps SELECT id, seed, E'char\\u00adge', '1', now() FROM idempotency_keys",
        )
        .await;
    let twin = operator.json("search.json").await["keys"][0].clone();
    assert_eq!((&twin["key"], &twin["principal"]), (&json!("key\u{202e}1"), &json!("al\u{2066}ice")));
    let id = twin["id"].as_str().unwrap();
    let whose = serde_urlencoded::to_string([("principal", "al\u{2066}ice"), ("tenant", "ac\u{feff}me")]).unwrap();
    let names = ["key⟨U+202E⟩1", "res⟨U+200B⟩ource", "al⟨U+2066⟩ice", "ac⟨U+FEFF⟩me"];
    let more = ["req⟨U+061C⟩7", "text⟨U+200D⟩plain", "char⟨U+00AD⟩ge", "<title>Key key⟨U+202E⟩1"];
    for (page, more) in [
        (format!("key?id={id}"), &more[..]),
        (format!("expire?id={id}"), &[]),
        ("search".into(), &[]),
        (format!("search?{whose}"), &[]),
        (format!("erase?{whose}"), &[]),
    ] {
        let text = operator.page(&page).await.text();
        for name in names.iter().chain(more) {
            assert!(text.contains(name), "{page}: {name}: {text}");
        }
        // What a form sends on is as it is; it is not what is read.
        let read: String =
            text.split(" value=\"").map(|part| part.split_once('"').map_or(part, |(_, rest)| rest)).collect();
        let hidden: Vec<char> = read
            .chars()
            .filter(|letter| "\u{202e}\u{200b}\u{2066}\u{feff}\u{61c}\u{200d}\u{ad}".contains(*letter))
            .collect();
        assert!(hidden.is_empty(), "{page}: {hidden:?}");
    }
}

// --- where it is ----------------------------------------------------------------------------------------------

#[actix_web::test]
async fn it_may_stand_deeper_and_behind_a_proxy_that_gives_it_another_path() {
    let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        let inspector = || Inspector::new(idempotency).protected_elsewhere();
        config.service(web::scope("/deep/down").service(inspector().scope("/here")));
        config.service(inspector().scope("/there/"));
    };
    let rig = Rig::builder().serve(routes).await;
    // A proxy would make `/deep/down` of `/ops`; what the browser makes of the links is what counts.
    for (asked, seen) in [
        ("/deep/down/here", "https://ops.example/ops/here"),
        ("/deep/down/here/", "https://ops.example/ops/here/"),
        ("/there/", "https://ops.example/ops/there/"),
    ] {
        let root = rig.get(asked).answer().await;
        assert_eq!(root.status, 303, "{asked}: {root:?}");
        let overview = reqwest::Url::parse(seen).unwrap().join(root.header("location").unwrap()).unwrap();
        let expected = format!("{}/overview", seen.trim_end_matches('/'));
        assert_eq!(overview.as_str(), expected);
    }
    let page = rig.get("/deep/down/here/overview").answer().await.text();
    for link in page.split("href=\"").skip(1).chain(page.split("src=\"").skip(1)).chain(page.split("action=\"").skip(1))
    {
        assert!(!link.starts_with('/') && !link.starts_with("http"), "{link}");
    }
}

#[actix_web::test]
async fn where_the_store_is_gone_the_process_still_tells_its_figures() {
    let (rig, operator) = open_rig(Policy::new().anonymous()).await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    let overview = operator.json("overview.json").await;
    assert!(overview["table"].is_null() && overview["events"].is_array(), "{overview}");
    let page = operator.page("overview").await;
    assert!(page.status == 200 && page.text().contains("The database does not answer"));
    for (page, kind) in [("search", "text/html; charset=utf-8"), ("search.json", "application/problem+json")] {
        let answer = operator.page(page).await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (503, Some(kind)));
        assert!(!answer.text().contains("idempotency_keys"));
    }
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    assert!(operator.json("overview.json").await["table"].is_object());
}

/// A value like any other: built in each worker, sent between threads, shown without what it holds.
#[actix_web::test]
async fn it_is_a_value() {
    fn is_value<T: Clone + Send + Sync + 'static>(value: T) -> T {
        value
    }
    let db = Db::new().await;
    let inspector = is_value(Inspector::new(&Idempotency::postgres(db.pool(1))).guard(guard::Get()));
    assert_eq!(
        format!("{inspector:?}"),
        "Inspector { guards: 1, is_protected_elsewhere: false, shows_bodies: false, .. }"
    );
    let _ = (Data::new(inspector), Gate::new(), HttpResponse::Ok());
}
