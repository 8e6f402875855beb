//! What makes two requests the same, and what becomes of a key that is used for another one.

use std::io::Write;

use actix_idempotency::{OnOutstanding, Policy};
use actix_web::rt::spawn;
use flate2::{Compression, GzBuilder};
use futures_util::future::join;
use serde_json::json;

use crate::support::{
    PATIENCE,
    app::order,
    client::{Answer, RequestExt},
    db::LAPSED,
    repeat,
    rig::Rig,
};

/// Sends a body under a key and with a content type to a handler that takes any body.
async fn send(rig: &Rig, key: &str, content_type: &str, body: impl Into<reqwest::Body>) -> Answer {
    rig.post("/slow?ms=0").key(key).header("content-type", content_type).body(body).answer().await
}

#[track_caller]
fn assert_reused(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (422, "key-reused"));
    assert!(answer.retry_after().is_none() && !answer.is_replay());
}

/// F01
#[actix_web::test]
async fn json_with_other_order_and_white_space_is_the_same_request() {
    let rig = Rig::start().await;
    for (key, content_type) in
        [("a", "application/json"), ("b", "application/json; charset=utf-8"), ("c", "application/vnd.shop+json")]
    {
        let post =
            |body: &'static str| rig.post("/orders").key(key).header("content-type", content_type).body(body).answer();
        let first = post(r#"{"sku":"a","qty":1}"#).await;
        assert_eq!(first.status, 201);
        first.assert_replayed_by(&post("{ \"qty\":1,\r\n\t\"sku\":\"\\u0061\" }\n").await);
    }
    assert_eq!(rig.db.effects("a").await, 3);
}

/// F01
#[actix_web::test]
async fn json_that_says_something_else_is_another_request() {
    let rig = Rig::start().await;
    let first = send(&rig, "a", "application/json", r#"{"a":1,"b":[1,2]}"#).await;
    for other in [
        r#"{"a":1,"b":[2,1]}"#,
        r#"{"a":1.0,"b":[1,2]}"#,
        r#"{"a":"1","b":[1,2]}"#,
        r#"{"a":1,"b":[1,2],"c":null}"#,
        r#"{"a":1}"#,
        r#"[{"a":1,"b":[1,2]}]"#,
        "",
    ] {
        assert_reused(&send(&rig, "a", "application/json", other).await);
    }
    first.assert_replayed_by(&send(&rig, "a", "application/json", r#"{"b":[1,2],"a":1}"#).await);
    assert_eq!(rig.db.all_effects().await, 1);
}

/// F01
#[actix_web::test]
async fn what_is_not_json_to_everybody_counts_as_its_bytes() {
    let rig = Rig::start().await;
    let deep = |blank: &str| format!("{}{blank}{}", "[".repeat(200), "]".repeat(200));
    let (deep_one, deep_other) = (deep(""), deep(" "));
    for (key, one, other) in [
        ("invalid", r#"{"a":"#, r#"{ "a":"#),
        ("repeated", r#"{"a":1,"a":2}"#, r#"{"a":1, "a":2}"#),
        ("deep", deep_one.as_str(), deep_other.as_str()),
    ] {
        let first = send(&rig, key, "application/json", one.to_owned()).await;
        assert_reused(&send(&rig, key, "application/json", other.to_owned()).await);
        first.assert_replayed_by(&send(&rig, key, "application/json", one.to_owned()).await);
    }
    let first = send(&rig, "text", "text/plain", r#"{"a":1}"#).await;
    assert_reused(&send(&rig, "text", "text/plain", r#"{ "a":1}"#).await);
    first.assert_replayed_by(&send(&rig, "text", "text/plain", r#"{"a":1}"#).await);
    assert_eq!(rig.db.all_effects().await, 4);
}

/// F03
#[actix_web::test]
async fn the_query_is_part_of_the_request() {
    let rig = Rig::start().await;
    let first = rig.post("/orders?dry=1").key("x").json(&order("x")).answer().await;
    for other in ["/orders?dry=0", "/orders", "/orders?", "/orders?dry=1&dry=1"] {
        assert_reused(&rig.post(other).key("x").json(&order("x")).answer().await);
    }
    first.assert_replayed_by(&rig.post("/orders?dry=1").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

/// F05
#[actix_web::test]
async fn the_same_key_at_another_endpoint_is_another_key() {
    let rig = Rig::start().await;
    let order_placed = rig.post("/orders").key("x").json(&order("x")).answer().await;
    let refunded = rig.post("/refunds").key("x").json(&order("x")).answer().await;
    assert!(order_placed.status == 201 && refunded.status == 201 && !refunded.is_replay());
    assert_ne!(order_placed.body, refunded.body);
    assert_eq!(rig.db.effects("x").await, 2);
    order_placed.assert_replayed_by(&rig.post("/orders").key("x").json(&order("x")).answer().await);
    refunded.assert_replayed_by(&rig.post("/refunds").key("x").json(&order("x")).answer().await);
}

/// F05
#[actix_web::test]
async fn endpoints_that_the_policy_gives_one_name_share_their_keys() {
    let rig = Rig::with(Policy::new().anonymous().resource("purchases")).await;
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.status, 201);
    // Never the other endpoint's answer, though.
    assert_reused(&rig.post("/refunds").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.text("SELECT resource AS value FROM idempotency_keys").await.unwrap(), "purchases");
}

/// F06
#[actix_web::test]
async fn headers_that_change_with_every_attempt_do_not_count() {
    let rig = Rig::with(Policy::new().principal(|_| Some("alice".into()))).await;
    let attempt = |n: u32| {
        rig.post("/orders")
            .key("x")
            .user(&format!("token-{n}"))
            .header("traceparent", format!("00-{n:032}-{n:016}-01"))
            .header("date", format!("Thu, 01 Jan 1970 00:00:0{n} GMT"))
            .header("user-agent", format!("test/{n}"))
            .header("accept-encoding", if n == 1 { "gzip" } else { "br" })
            .header("x-forwarded-for", format!("10.0.0.{n}"))
            .json(&order("x"))
            .answer()
    };
    let first = attempt(1).await;
    first.assert_replayed_by(&attempt(2).await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// F06
#[actix_web::test]
async fn a_header_that_the_policy_names_counts() {
    let rig = Rig::with(Policy::new().anonymous().fingerprint_header("x-api-version")).await;
    let with = |version: &[&'static str]| {
        let request = rig.post("/orders").key("x").json(&order("x"));
        version.iter().fold(request, |request, version| request.header("x-api-version", *version)).answer()
    };
    let first = with(&["1"]).await;
    for other in [&["2"][..], &[], &["1", "1"], &[""]] {
        assert_reused(&with(other).await);
    }
    first.assert_replayed_by(&with(&["1"]).await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// F09
#[actix_web::test]
async fn another_request_is_refused_while_the_first_runs_and_afterwards() {
    let rig = Rig::start().await;
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    assert_reused(&rig.post("/held").key("x").body("b").answer().await);
    let same = rig.post("/held").key("x").body("a").answer().await;
    assert_eq!((same.status.as_u16(), same.code().as_str()), (409, "outstanding"));
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!(first.status, 201);
    assert_reused(&rig.post("/held").key("x").body("b").answer().await);
    first.assert_replayed_by(&rig.post("/held").key("x").body("a").answer().await);
    assert_eq!((rig.db.effects("a").await, rig.db.effects("b").await), (1, 0));
}

/// F09
#[actix_web::test]
async fn of_two_requests_that_race_for_a_key_one_runs_and_the_other_is_refused() {
    let rig = Rig::start().await;
    let twin = rig.twin(Policy::new().anonymous());
    for round in 0..repeat(50, 10) {
        let key = format!("k{round}");
        let a = rig.post("/orders").key(&key).json(&order("a")).answer();
        let b = twin.post("/orders").key(&key).json(&order("b")).answer();
        let (a, b) = join(a, b).await;
        let (winner, loser) = if a.status == 201 { (a, b) } else { (b, a) };
        assert_eq!(winner.status, 201);
        assert_reused(&loser);
        assert_eq!(rig.db.all_effects().await, round as i64 + 1);
    }
}

/// F09
#[actix_web::test]
async fn another_request_is_refused_at_once_where_the_same_would_wait() {
    let rig = Rig::with(Policy::new().anonymous().on_outstanding(OnOutstanding::Wait(PATIENCE))).await;
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    assert_reused(&rig.post("/held").key("x").body("b").answer().await);
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 201);
}

#[actix_web::test]
async fn a_multipart_form_is_the_same_under_every_boundary() {
    let rig = Rig::start().await;
    let submit = |boundary: &str, value: &str| {
        let body = format!(
            "--{boundary}\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n\
             --{boundary}\r\ncontent-disposition: form-data; name=\"f\"; filename=\"f.txt\"\r\n\
             content-type: text/plain\r\n\r\nline\r\n\r\n--{boundary}--\r\n"
        );
        rig.post("/slow?ms=0")
            .key("x")
            .header("content-type", format!("multipart/form-data; boundary={boundary}"))
            .body(body)
            .answer()
    };
    let first = submit("----WebKitFormBoundary7MA4YWxkTrZu0gW", "1").await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&submit("xxxx", "1").await);
    assert_reused(&submit("xxxx", "2").await);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn an_encoded_body_counts_as_its_bytes() {
    let rig = Rig::start().await;
    let gzip = |seconds: u32| {
        let mut encoder = GzBuilder::new().mtime(seconds).write(Vec::new(), Compression::default());
        encoder.write_all(order("x").to_string().as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let post = |body: Vec<u8>| {
        rig.post("/orders")
            .key("x")
            .header("content-type", "application/json")
            .header("content-encoding", "gzip")
            .body(body)
            .answer()
    };
    let first = post(gzip(1)).await;
    assert_eq!(first.status, 201, "the handler reads the decoded body");
    first.assert_replayed_by(&post(gzip(1)).await);
    assert_reused(&post(gzip(2)).await);
    assert_eq!(rig.db.effects("x").await, 1);
}

#[actix_web::test]
async fn a_new_recipe_replays_what_was_answered_under_the_old_one() {
    let rig = Rig::start().await;
    let deployed = rig.twin(Policy::new().anonymous().fingerprint_header("x-api-version"));
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    first.assert_replayed_by(&deployed.post("/orders").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

#[actix_web::test]
async fn a_new_recipe_does_not_run_what_is_outstanding_under_the_old_one() {
    let rig = Rig::start().await;
    let deployed = rig.twin(Policy::new().anonymous().fingerprint_header("x-api-version"));
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    let conflict = || async {
        let answer = deployed.post("/held").key("x").body("a").answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "outstanding"));
        assert_eq!(answer.retry_after(), Some(1));
    };
    conflict().await;
    rig.gate.open(1);
    let first = first.await.unwrap();
    first.assert_replayed_by(&deployed.post("/held").key("x").body("a").answer().await);
    // Not even once its lease has lapsed: whether it is the same request cannot be known.
    rig.db.run(LAPSED).await;
    conflict().await;
    assert_eq!(rig.db.effects("a").await, 1);
}

#[actix_web::test]
async fn a_new_recipe_may_use_a_key_under_which_nothing_was_done() {
    let rig = Rig::start().await;
    let deployed = rig.twin(Policy::new().anonymous().fingerprint_header("x-api-version"));
    let malformed = rig.post("/orders").key("x").header("content-type", "application/json").body("{").answer().await;
    assert_eq!(malformed.status, 400);
    assert_eq!(deployed.post("/orders").key("x").json(&order("x")).answer().await.status, 201);
    // After a failure it may not: something may have been done for the old request.
    let panics = json!({"sku": "y", "qty": -1});
    assert_eq!(rig.post("/orders").key("y").json(&panics).answer().await.status, 500);
    assert_eq!(deployed.post("/orders").key("y").json(&panics).answer().await.status, 409);
    assert_eq!(rig.post("/orders").key("y").json(&panics).answer().await.status, 500, "the old one may");
}

#[actix_web::test]
async fn a_row_from_a_newer_version_is_left_alone() {
    let rig = Rig::start().await;
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    for column in ["recipe_version", "snapshot_version"] {
        rig.db.run(&format!("UPDATE idempotency_keys SET {column} = 32767")).await;
        for sku in ["x", "y"] {
            let refused = rig.post("/orders").key("x").json(&order(sku)).answer().await;
            assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "newer-version"));
            assert_eq!(refused.retry_after(), Some(1));
        }
        rig.db.run(&format!("UPDATE idempotency_keys SET {column} = 1")).await;
    }
    first.assert_replayed_by(&rig.post("/orders").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_running_request_of_a_newer_version_is_left_alone() {
    let rig = Rig::start().await;
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    rig.db.run("UPDATE idempotency_keys SET recipe_version = 32767, leased_until = now() - interval '1 s'").await;
    for body in ["a", "b"] {
        assert_eq!(rig.post("/held").key("x").body(body).answer().await.code(), "newer-version");
    }
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 201);
}
