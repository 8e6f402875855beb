//! Where keys come from: every source, alone and in a chain.

use std::{
    io::Write,
    panic::{UnwindSafe, catch_unwind},
};

use actix_idempotency::{Fields, Idempotency, InvalidKey, Keep, KeySource, OnFailure, PgPool, Policy};
use actix_web::{
    HttpResponse, Result,
    web::{self, Data},
};
use flate2::{Compression, write::GzEncoder};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::{
    app::{created, effect},
    client::{Answer, RequestExt},
    rig::Rig,
};

const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

async fn run(pool: Data<PgPool>) -> Result<HttpResponse> {
    Ok(created(effect(&pool, "run").await?))
}

/// A POST for each of these paths, under a policy of its own.
async fn rig<const N: usize>(policies: [(&'static str, Policy); N]) -> Rig {
    Rig::builder()
        .serve(move |config, idempotency, _| {
            for (path, policy) in &policies {
                let wrap = idempotency.with(policy.clone());
                config.service(web::resource(*path).wrap(wrap).route(web::post().to(run)));
            }
        })
        .await
}

fn keyed_by(sources: impl IntoIterator<Item = KeySource>) -> Policy {
    Policy::new().keys(sources).anonymous().require_key()
}

async fn post(rig: &Rig, path: &str, content_type: &str, body: impl Into<reqwest::Body>) -> Answer {
    rig.post(path).header("content-type", content_type).body(body).answer().await
}

/// It ran.
#[track_caller]
fn assert_first(answer: &Answer) {
    assert!(answer.status == 201 && !answer.is_replay(), "{answer:?}");
}

/// It is told why its key cannot be read.
#[track_caller]
fn assert_invalid(answer: &Answer, words: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (400, "key-invalid"));
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains(words), "{detail}");
}

#[actix_web::test]
async fn the_first_source_that_has_a_key_wins_and_keys_of_different_sources_never_meet() {
    let sources = [
        KeySource::header(),
        KeySource::json(["/no"]),
        KeySource::form(["no"]),
        KeySource::path(["no"]),
        KeySource::query(["no"]),
        KeySource::computed("test", |request, _| {
            Ok(request.headers().get("x-no").map(|no| no.to_str().unwrap().to_owned()))
        }),
    ];
    let policy = keyed_by(sources).resource("one");
    let rig = rig([("/x", policy.clone()), ("/y/{no}", policy)]).await;
    let json = || rig.post("/x").json(&json!({"no": "A"}));
    // The same text from everywhere.
    let send = async |from: &str| match from {
        "header" => json().key("A").answer().await,
        "json" => json().answer().await,
        "form" => post(&rig, "/x?no=A", FORM, "no=A").await,
        "path" => rig.post("/y/A?no=A").answer().await,
        "query" => rig.post("/x?no=A").header("x-no", "A").answer().await,
        "closure" => rig.post("/x").header("x-no", "A").answer().await,
        other => panic!("{other}?"),
    };
    for from in ["header", "json", "form", "path", "query", "closure"] {
        let first = send(from).await;
        assert_first(&first);
        first.assert_replayed_by(&send(from).await);
    }
    assert_eq!(rig.db.effects("run").await, 6);
    assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_keys WHERE key = 'A'").await, 6);
    // The header is first: with another one it is another operation, whatever the body says.
    assert_first(&json().key("B").answer().await);
    let other = json!({"no": "other"});
    assert_eq!(rig.post("/x").key("A").json(&other).answer().await.code(), "key-reused");
}

/// K01, K11
#[actix_web::test]
async fn where_no_source_has_a_key_the_request_passes_or_is_told_what_the_key_is_made_of() {
    let sources = || [KeySource::json(["/out_trade_no"]), KeySource::query(["no"])];
    let optional = Policy::new().keys(sources()).anonymous();
    let rig = rig([("/optional", optional), ("/required", keyed_by(sources()))]).await;
    for body in [json!({}), json!({"out_trade_no": null}), json!([1])] {
        assert_first(&rig.post("/optional").json(&body).answer().await);
        assert_first(&rig.post("/optional").json(&body).answer().await);
        let refused = rig.post("/required").json(&body).answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "key-missing"));
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("json /out_trade_no, else query no"), "{detail}");
    }
    // The header is no source here, and the body no JSON.
    assert_eq!(rig.post("/required").key("x").body("out_trade_no").answer().await.code(), "key-missing");
    assert_eq!((rig.db.effects("run").await, rig.db.keys().await), (6, 0));
}

#[actix_web::test]
async fn a_business_key_of_two_fields_shows_where_each_ends() {
    let rig = rig([("/x", keyed_by([KeySource::json(["/user/id", "/items/0/sku"])]))]).await;
    let send = |user: Value, sku: &str| {
        rig.post("/x").json(&json!({"user": {"id": user}, "items": [{"sku": sku}, {"sku": "z"}]})).answer()
    };
    let first = send(json!(7), "a").await;
    assert_first(&first);
    first.assert_replayed_by(&send(json!(7), "a").await);
    assert_eq!(rig.db.state("7:a").await.as_deref(), Some("completed"));
    assert_first(&send(json!("a:b"), "c").await);
    assert_first(&send(json!("a"), "b:c").await);
    // A key may have anything in it, and any length.
    for odd in ["ü\n\"\\,;%", "\u{0}", &"x".repeat(10_000)] {
        let first = send(json!(odd), "a").await;
        assert_first(&first);
        first.assert_replayed_by(&send(json!(odd), "a").await);
    }
}

#[actix_web::test]
async fn parameters_of_path_and_query_are_keys() {
    let path = keyed_by([KeySource::path(["id"])]);
    let query = keyed_by([KeySource::query(["a", "b"])]).compare(Fields::none());
    let rig = rig([("/orders/{id}/payments", path), ("/q", query)]).await;
    let send = |path: &'static str| rig.post(path).answer();
    let first = send("/orders/1/payments").await;
    assert_first(&first);
    first.assert_replayed_by(&send("/orders/1/payments").await);
    assert_first(&send("/orders/2/payments").await);
    assert_first(&send("/orders/a%2Fb%25/payments").await);
    assert_eq!(rig.db.state("a/b%25").await.as_deref(), Some("completed"));

    let first = send("/q?a=1&b=2").await;
    assert_first(&first);
    first.assert_replayed_by(&send("/q?a=1&b=2").await);
    // The same key; what is compared has the query in it.
    assert_eq!(send("/q?b=2&a=1").await.code(), "key-reused");
    assert_invalid(&send("/q?a=1").await, "part of the key");
    assert_invalid(&send("/q?a=1&b=").await, "part of the key");
    assert_invalid(&send("/q?a=1&b=2&b=2").await, "part of the key");
    assert_eq!(send("/q?c=3").await.code(), "key-missing");
}

#[actix_web::test]
async fn a_form_field_is_a_key() {
    let rig = rig([("/x", keyed_by([KeySource::form(["no", "user"])]))]).await;
    let send = |body: &'static str| post(&rig, "/x", "application/x-www-form-urlencoded; charset=utf-8", body);
    let first = send("no=1+2&user=%C3%BC").await;
    assert_first(&first);
    first.assert_replayed_by(&send("no=1+2&user=%C3%BC").await);
    assert_eq!(send("user=%C3%BC&no=1%202").await.code(), "key-reused");
    assert_first(&send("no=1&user=%C3%BC").await);
    for bad in ["no=1", "no=&user=1", "no=1&no=2&user=1"] {
        assert_invalid(&send(bad).await, "part of the key");
    }
    assert_eq!(send("x=y").await.code(), "key-missing");
    assert_eq!(post(&rig, "/x", "text/plain", "no=1&user=2").await.code(), "key-missing");
}

#[actix_web::test]
async fn a_key_can_be_computed_from_the_request_and_its_body() {
    let computed = KeySource::computed("device and first word", |request, body| {
        let Some(device) = request.headers().get("x-device") else { return Ok(None) };
        let body = std::str::from_utf8(body).map_err(|_| InvalidKey::Body)?;
        let word = body.split(' ').next().unwrap_or_default();
        Ok(Some(format!("{}/{word}", device.to_str().map_err(|_| InvalidKey::Field)?)))
    });
    let rig = rig([("/x", keyed_by([computed, KeySource::header()]))]).await;
    let send = |body: &'static [u8]| rig.post("/x").header("x-device", "d1").body(body).answer();
    let first = send(b"one and").await;
    assert_first(&first);
    first.assert_replayed_by(&send(b"one and").await);
    assert_eq!(send(b"one or").await.code(), "key-reused");
    assert_first(&send(b"two or").await);
    assert_invalid(&rig.post("/x").header("x-device", "d1").key("k").body(&b"\xff"[..]).answer().await, "body");
    assert_first(&rig.post("/x").key("k").body("one").answer().await);
}

#[derive(Deserialize)]
struct OrderReq {
    user_id: u64,
    product_id: u64,
}

#[actix_web::test]
async fn a_key_can_be_made_of_the_body_as_a_type() {
    let typed = Policy::new()
        .key_from_json::<OrderReq>(|order| format!("{}:{}", order.user_id, order.product_id))
        .anonymous()
        .require_key();
    let rig = rig([("/x", typed)]).await;
    let send = |body: &'static str| post(&rig, "/x", JSON, body);
    let first = send(r#"{"user_id":1,"product_id":2}"#).await;
    assert_first(&first);
    first.assert_replayed_by(&send(r#"{ "product_id":2, "user_id":1 }"#).await);
    assert_eq!(send(r#"{"user_id":1,"product_id":2,"more":3}"#).await.code(), "key-reused");
    assert_first(&send(r#"{"user_id":1,"product_id":3}"#).await);
    for bad in ["", "{", r#"{"user_id":1}"#, r#"{"user_id":-1,"product_id":2}"#, "[]", "user_id=1"] {
        assert_invalid(&send(bad).await, "the body");
    }
}

#[actix_web::test]
async fn a_digest_has_the_fields_that_it_is_told_to_have() {
    let by = |fields: Fields| keyed_by([KeySource::digest(fields)]);
    let rig = rig([
        ("/all", by(Fields::all())),
        ("/only", by(Fields::only(["/sku", "/qty"]))),
        ("/all-but", by(Fields::all_but(["/requestTime", "/meta/nonce"]))),
        ("/no-nulls", by(Fields::all().drop_nulls())),
        ("/raw", by(Fields::raw())),
        ("/none", by(Fields::none())),
    ])
    .await;
    let base = r#"{"sku":"a","qty":1.0,"requestTime":1,"meta":{"nonce":"x","n":null}}"#;
    let variants = [
        (r#"{ "meta":{"n":null,"nonce":"x"}, "qty":1.0,"requestTime":1,"sku":"\u0061" }"#, "order and escapes"),
        (r#"{"sku":"a","qty":1.0,"requestTime":2,"meta":{"nonce":"y","n":null}}"#, "time and nonce"),
        (r#"{"sku":"a","qty":1.0,"requestTime":1,"meta":{"nonce":"x"}}"#, "no null"),
        (r#"{"sku":"a","qty":1,"requestTime":1,"meta":{"nonce":"x","n":null}}"#, "1 for 1.0"),
        (r#"{"sku":"b","qty":1.0,"requestTime":1,"meta":{"nonce":"x","n":null}}"#, "sku"),
    ];
    // Which of them are the same request as the base.
    let same: [(&str, [bool; 5]); 6] = [
        ("/all", [true, false, false, false, false]),
        ("/only", [true, true, true, false, false]),
        ("/all-but", [true, true, false, false, false]),
        ("/no-nulls", [true, false, true, false, false]),
        ("/raw", [false, false, false, false, false]),
        ("/none", [true, true, true, true, true]),
    ];
    for (path, same) in same {
        let first = post(&rig, path, JSON, base).await;
        assert_first(&first);
        for ((body, what), same) in variants.into_iter().zip(same) {
            let answer = post(&rig, path, JSON, body).await;
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, same), "{path}: {what}");
        }
        first.assert_replayed_by(&post(&rig, path, JSON, base).await);
        // The query is always part of it.
        assert_first(&post(&rig, &format!("{path}?dry=1"), JSON, base).await);
    }
}

#[actix_web::test]
async fn what_is_there_and_cannot_be_read_never_falls_through() {
    let then_digest = |source| keyed_by([source, KeySource::digest(Fields::all())]);
    let rig = rig([
        ("/header", then_digest(KeySource::header())),
        ("/json", then_digest(KeySource::json(["/a", "/b"]))),
        ("/form", then_digest(KeySource::form(["a"]))),
        ("/query", then_digest(KeySource::query(["a"]))),
        ("/computed", then_digest(KeySource::computed("never", |_, _| Err(InvalidKey::Field)))),
        ("/long", then_digest(KeySource::computed("empty", |_, _| Ok(Some(String::new()))))),
    ])
    .await;
    for key in ["", " ", "a b", "a,b", "\"a", "\"\"", &"k".repeat(256)] {
        assert_invalid(&rig.post("/header").key(key).answer().await, "key");
    }
    assert_invalid(&rig.post("/header").key("a").key("a").answer().await, "more than once");
    for bad in ["", "{", "nonsense", "NaN", r#"{"a":NaN,"b":1}"#, r#"{"a":1,"a":1,"b":1}"#] {
        assert_invalid(&post(&rig, "/json", JSON, bad).await, "the body");
    }
    for bad in [r#"{"a":1}"#, r#"{"a":1,"b":null}"#, r#"{"a":1,"b":""}"#, r#"{"a":1,"b":[]}"#, r#"{"a":{},"b":1}"#] {
        assert_invalid(&post(&rig, "/json", JSON, bad).await, "part of the key");
    }
    assert_invalid(&post(&rig, "/form", FORM, "a=1&a=1").await, "part of the key");
    assert_invalid(&rig.post("/query?a=1&a=2").answer().await, "part of the key");
    assert_invalid(&rig.post("/computed").answer().await, "part of the key");
    assert_invalid(&rig.post("/long").answer().await, "empty");
    // Encoded, it cannot be read either.
    let gzipped = |text: &str| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    };
    for (path, content_type, text) in [("/json", JSON, r#"{"a":1,"b":2}"#), ("/form", FORM, "a=1")] {
        let encoded = rig.post(path).header("content-type", content_type).header("content-encoding", "gzip");
        assert_invalid(&encoded.body(gzipped(text)).answer().await, "the body");
    }
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
    // The next source is asked where there is nothing.
    for path in ["/header", "/json", "/form", "/query"] {
        assert_first(&post(&rig, path, "text/plain", "a").await);
    }
}

#[actix_web::test]
async fn rules_for_keys_are_told_in_their_own_words() {
    let ours = Policy::new().anonymous().key_rule("A key starts with s1-.", |key| key.starts_with("s1-"));
    let rig = rig([
        ("/uuid", Policy::new().anonymous().uuid_keys()),
        ("/length", Policy::new().anonymous().key_length(4..=6)),
        ("/ours", ours.key_length(1..=10)),
        ("/computed", keyed_by([KeySource::header(), KeySource::json(["/no"])]).uuid_keys()),
    ])
    .await;
    let refused = async |path: &str, key: &str, detail: &str| {
        let answer = rig.post(path).key(key).answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (400, "key-invalid"), "{key}");
        assert_eq!(answer.json()["detail"], detail);
    };
    let uuid = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    for bad in ["x", "8e03978e40d543e8bc936894a57f9324", &format!("{{{uuid}}}"), &format!("{uuid}0")] {
        refused("/uuid", bad, "The key is a UUID.").await;
    }
    for (bad, good) in [("abc", "abcd"), ("abcdefg", "abcdef")] {
        refused("/length", bad, "The key has 4 to 6 bytes.").await;
        assert_first(&rig.post("/length").key(good).answer().await);
    }
    refused("/ours", "s2-1", "A key starts with s1-.").await;
    refused("/ours", "s1-34567890", "The key has 1 to 10 bytes.").await;
    for (path, good) in [("/uuid", uuid), ("/ours", "s1-3456789"), ("/computed", uuid)] {
        assert_first(&rig.post(path).key(good).answer().await);
    }
    // They are for what clients choose.
    refused("/computed", "x", "The key is a UUID.").await;
    assert_first(&rig.post("/computed").json(&json!({"no": "x"})).answer().await);
}

#[track_caller]
fn assert_panics<T>(words: &str, build: impl FnOnce() -> T + UnwindSafe) {
    let Err(panic) = catch_unwind(build) else { panic!("it should not build: {words}") };
    let message = match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().unwrap()).to_owned(),
    };
    assert!(message.contains(words), "{message}");
}

/// Z02
#[test]
fn a_key_that_the_server_computes_needs_to_be_somebodys() {
    let build = |policy| Idempotency::from_app_data().with(policy);
    let computed = || {
        [
            (KeySource::digest(Fields::all()), "digest of"),
            (KeySource::json(["/a"]), "json /a"),
            (KeySource::form(["a"]), "form a"),
            (KeySource::path(["a"]), "path a"),
            (KeySource::query(["a"]), "query a"),
            (KeySource::computed("mine", |_, _| Ok(None)), "computed mine"),
        ]
    };
    for (source, name) in computed() {
        let policy = Policy::new().keys([KeySource::header(), source]);
        for policy in [policy.clone(), policy.clone().refuse_anonymous()] {
            let told = std::panic::AssertUnwindSafe(policy);
            assert_panics(name, move || build({ told }.0));
        }
        build(policy.clone().anonymous());
        build(policy.principal(|_| None));
    }
    build(Policy::new());
}

/// What a forged request is told would be kept against the real one.
#[test]
fn errors_are_not_kept_under_keys_that_anybody_can_compute_and_nobody_owns() {
    let build = |policy| Idempotency::from_app_data().with(policy);
    let computed = || Policy::new().keys([KeySource::header(), KeySource::json(["/out_trade_no"])]).anonymous();
    let keeps = [
        computed().keep(Keep::Draft),
        computed().keep(Keep::DraftWithValidation),
        computed().keep(Keep::Everything),
        computed().keep(Keep::when(|status| status == 404)),
        computed().on_failure(OnFailure::Store),
        computed().on_failure(OnFailure::HoldRetention),
    ];
    for policy in keeps {
        build(policy.clone().principal(|_| Some("the provider".into())));
        build(policy.clone().keys([KeySource::header()]));
        let told = std::panic::AssertUnwindSafe(policy);
        assert_panics("json /out_trade_no", move || build({ told }.0));
    }
    build(computed().on_failure(OnFailure::HoldLease));
    build(computed().keep(Keep::when(|status| status.is_success())));
}

#[test]
fn settings_that_contradict_each_other_do_not_build() {
    let build = |policy| Idempotency::from_app_data().with(policy);
    assert_panics("Policy::stream_body", move || {
        build(Policy::new().anonymous().keys([KeySource::json(["/a"])]).stream_body())
    });
    assert_panics("Policy::compare", move || build(Policy::new().stream_body().compare(Fields::all())));
    for name in ["Policy::atomic()", "Policy::stream_body"] {
        assert_panics(name, move || build(Policy::new().stream_body().atomic()));
    }
    for hold in [OnFailure::HoldLease, OnFailure::HoldRetention] {
        assert_panics("Policy::atomic()", move || build(Policy::new().atomic().on_failure(hold)));
    }
    build(Policy::new().atomic().on_failure(OnFailure::Store));
    build(Policy::new().anonymous().keys([KeySource::path(["a"])]).stream_body());
    assert_panics("name at least one source", || Policy::new().keys([]));
    assert_panics("allows no key", || Policy::new().key_length(1..=256));
    #[expect(clippy::reversed_empty_ranges, reason = "on purpose")]
    let empty = 2..=1;
    assert_panics("allows no key", || Policy::new().key_length(empty));
    assert_panics("at least one secret", || Policy::new().fingerprint_secrets([]));
}

#[test]
fn what_is_no_json_pointer_does_not_build() {
    for bad in ["a", "#/a", "$.a", "/~2", "/a~"] {
        assert_panics(bad, move || KeySource::json([bad]));
        assert_panics(bad, move || Fields::only(["/good", bad]));
        assert_panics(bad, move || Fields::all_but([bad]));
    }
    assert_panics("at least one", || KeySource::json::<&str>([]));
    assert_panics("at least one", || KeySource::form::<&str>([]));
}

#[actix_web::test]
async fn json_that_parsers_disagree_about_counts_as_its_bytes() {
    let digest = keyed_by([KeySource::digest(Fields::all_but(["/t"]))]);
    let business = keyed_by([KeySource::json(["/no"])]);
    let typed = Policy::new().key_from_json::<Value>(|value| value.to_string()).anonymous();
    let rig =
        rig([("/header", Policy::new().anonymous()), ("/digest", digest), ("/business", business), ("/typed", typed)])
            .await;
    let deep = |depth: usize| format!("{{\"no\":1,\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    let odd = [
        deep(128),
        deep(200_000),
        format!("{{\"no\":1,\"a\":{}", "{\"a\":".repeat(150_000)),
        r#"{"no":1,"t":1,"t":1}"#.to_owned(),
        r#"{"no":NaN}"#.into(),
        r#"{"no":Infinity}"#.into(),
        r#"{"no":01}"#.into(),
        r#"{"no":"\ud800"}"#.into(),
        "\u{feff}{\"no\":1}".into(),
    ];
    for (n, body) in odd.iter().enumerate() {
        let key = format!("k{n}");
        let keyed = |body: String| rig.post("/header").key(&key).header("content-type", JSON).body(body).answer();
        let first = keyed(body.clone()).await;
        assert_first(&first);
        first.assert_replayed_by(&keyed(body.clone()).await);
        assert_eq!(keyed(format!(" {body}")).await.code(), "key-reused");

        let first = post(&rig, "/digest", JSON, body.clone()).await;
        assert_first(&first);
        first.assert_replayed_by(&post(&rig, "/digest", JSON, body.clone()).await);
        assert_first(&post(&rig, "/digest", JSON, format!(" {body}")).await);

        assert_invalid(&post(&rig, "/business", JSON, body.clone()).await, "the body");
        if !body.contains("\"t\"") {
            assert_invalid(&post(&rig, "/typed", JSON, body.clone()).await, "the body");
        }
    }
    // One less deep it is canonical.
    let first = post(&rig, "/digest", JSON, deep(127)).await;
    assert_first(&first);
    first.assert_replayed_by(&post(&rig, "/digest", JSON, format!(" {}", deep(127))).await);
    assert_first(&post(&rig, "/business", JSON, deep(127)).await);
}

#[actix_web::test]
async fn a_body_of_a_mebibyte_of_members_is_canonical_and_over_it_refused() {
    let rig = rig([("/x", keyed_by([KeySource::digest(Fields::all_but(["/k1"]))]))]).await;
    let members: Vec<_> = (0..70_000).map(|n| format!("\"k{n}\":{n}")).collect();
    let forward = format!("{{{}}}", members.join(","));
    assert!((900_000..1_048_576).contains(&forward.len()), "{}", forward.len());
    let backward = format!("{{{}}}", members.iter().rev().cloned().collect::<Vec<_>>().join(","));
    let first = post(&rig, "/x", JSON, forward.clone()).await;
    assert_first(&first);
    first.assert_replayed_by(&post(&rig, "/x", JSON, backward).await);
    let over = format!("{forward}{}", " ".repeat(1_048_577 - forward.len()));
    assert_eq!(post(&rig, "/x", JSON, over).await.code(), "body-too-large");
    assert_eq!(rig.db.effects("run").await, 1);
}

#[actix_web::test]
async fn a_body_of_another_type_counts_as_a_whole() {
    let rig = rig([
        ("/digest", keyed_by([KeySource::digest(Fields::only(["/a"]))])),
        ("/business", keyed_by([KeySource::json(["/a"])])),
    ])
    .await;
    for content_type in ["text/plain", "application/xml", FORM, "application/octet-stream"] {
        for body in [r#"{"a":1,"b":1}"#, r#"{"a":1,"b":2}"#] {
            assert_eq!(post(&rig, "/business", content_type, body).await.code(), "key-missing");
        }
    }
    for body in [r#"{"a":1,"b":1}"#, r#"{"a":1,"b":2}"#] {
        let first = post(&rig, "/digest", "text/plain", body).await;
        assert_first(&first);
        first.assert_replayed_by(&post(&rig, "/digest", "text/plain", body).await);
    }
    assert_eq!(rig.db.effects("run").await, 2);
}
