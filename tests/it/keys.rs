//! What counts as a key, and what a request without one gets.

use actix_idempotency::{Idempotency, MAX_KEY_LENGTH, PgPool, Policy};
use actix_web::{
    HttpResponse, Result, http,
    web::{self, Data, ServiceConfig},
};
use reqwest::Method;

use crate::support::{
    app::{effect, order},
    client::{RequestExt, post},
    rig::Rig,
};

/// A route that takes every method, and counts.
fn any(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    async fn count(pool: Data<PgPool>) -> Result<HttpResponse> {
        let id = effect(&pool, "any").await?;
        Ok(HttpResponse::Ok().insert_header(("x-count", id.to_string())).finish())
    }
    config.service(web::resource("/any").wrap(idempotency.clone()).to(count));
}

/// K01
#[actix_web::test]
async fn requests_without_a_key_run_unprotected_and_leave_no_row() {
    let rig = Rig::start().await;
    let one = rig.post("/orders").json(&order("x")).answer().await;
    let two = rig.post("/orders").json(&order("y")).answer().await;
    assert_eq!((one.status.as_u16(), two.status.as_u16()), (201, 201));
    assert_ne!(one.json()["id"], two.json()["id"]);
    let again = rig.post("/orders").json(&order("y")).answer().await;
    assert_ne!(two.json()["id"], again.json()["id"]);
    assert_eq!(rig.db.all_effects().await, 3);
    assert_eq!(rig.db.keys().await, 0);
}

/// K01, K11
#[actix_web::test]
async fn where_a_key_is_required_a_request_without_one_is_told_to_send_one_per_intent() {
    let rig = Rig::with(Policy::new().anonymous().require_key()).await;
    let refused = rig.post("/orders").json(&order("x")).answer().await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.code(), "key-missing");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("Idempotency-Key") && detail.contains("one key for one intent"), "{detail}");
    assert!(refused.retry_after().is_none());
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.db.keys().await, 0);
    // What needs no protection needs no key.
    assert_eq!(rig.get("/orders").answer().await.status, 200);
}

/// K11
#[actix_web::test]
async fn the_crate_never_invents_a_key() {
    let rig = Rig::start().await;
    let answer = rig.post("/orders").json(&order("x")).answer().await;
    assert!(answer.headers.keys().all(|name| !name.as_str().contains("idempotency")), "{:?}", answer.headers);
    assert_eq!(rig.db.keys().await, 0);
}

/// K03
#[actix_web::test]
async fn a_repeated_key_header_is_refused_even_where_the_lines_are_equal() {
    let rig = Rig::start().await;
    for (one, two) in [("a", "b"), ("a", "a"), ("", "a"), ("a", "")] {
        let refused = rig.post("/orders").key(one).key(two).json(&order("x")).answer().await;
        assert_eq!(refused.status, 400, "{one:?} and {two:?}");
        assert_eq!(refused.code(), "key-invalid");
    }
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.post("/orders").key("b").json(&order("x")).answer().await.status, 201);
}

/// K04
#[actix_web::test]
async fn an_empty_key_is_refused_and_never_taken_for_none() {
    let rig = Rig::start().await;
    for empty in ["", "   ", "\t", "\"\"", "\" \""] {
        for sku in ["x", "y"] {
            let body = order(sku).to_string();
            let mut raw = rig.raw().await;
            raw.send(post("/orders", empty, &body)).await.unwrap();
            let refused = raw.answer().await;
            assert_eq!(refused.status, 400, "{empty:?}");
            assert_eq!(refused.code(), "key-invalid");
        }
    }
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.db.keys().await, 0);
}

/// K06
#[actix_web::test]
async fn control_bytes_in_a_key_are_refused() {
    let rig = Rig::start().await;
    for byte in (0..=0x20).chain(0x7f..=0xff) {
        let mut request = b"POST /orders HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n".to_vec();
        request.extend(b"content-length: 19\r\nidempotency-key: a");
        request.push(byte);
        request.extend(b"b\r\n\r\n{\"sku\":\"x\",\"qty\":1}");
        let mut raw = rig.raw().await;
        raw.send(request).await.unwrap();
        // Some of them are not even HTTP: those actix refuses itself.
        let head = raw.head().await;
        assert!(head.starts_with("HTTP/1.1 400 "), "{byte:#04x}: {head}");
    }
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.db.keys().await, 0);
}

/// K07
#[actix_web::test]
async fn a_bare_key_and_a_quoted_one_are_the_same() {
    let rig = Rig::start().await;
    let bare = rig.post("/orders").key("abc").json(&order("x")).answer().await;
    let quoted = rig.post("/orders").key("\"abc\"").json(&order("x")).answer().await;
    bare.assert_replayed_by(&quoted);
    assert_eq!(rig.db.all_effects().await, 1);
}

/// K07
#[actix_web::test]
async fn a_key_that_is_badly_quoted_is_refused() {
    let rig = Rig::start().await;
    for bad in ["\"a", "a\"", "\"a\"b", "\"a\";p=1", "\"a\", \"b\"", "a, b", "a,b", "a;b", "a b", "\\", "\"a\\\"b\""] {
        let refused = rig.post("/orders").key(bad).json(&order("x")).answer().await;
        assert_eq!(refused.status, 400, "{bad}");
        assert_eq!(refused.code(), "key-invalid", "{bad}");
    }
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.db.keys().await, 0);
}

#[actix_web::test]
async fn a_key_has_at_most_255_bytes() {
    let rig = Rig::start().await;
    let longest = "k".repeat(MAX_KEY_LENGTH);
    let first = rig.post("/orders").key(&longest).json(&order("x")).answer().await;
    let retry = rig.post("/orders").key(&format!("\"{longest}\"")).json(&order("x")).answer().await;
    first.assert_replayed_by(&retry);
    let refused = rig.post("/orders").key(&format!("{longest}k")).json(&order("x")).answer().await;
    assert_eq!(refused.code(), "key-invalid");
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn keys_that_differ_in_a_letter_or_its_case_are_two_keys() {
    let rig = Rig::start().await;
    for key in ["abc", "ABC", "abd", "abc.", "../abc", "%61bc"] {
        let answer = rig.post("/orders").key(key).json(&order("x")).answer().await;
        assert!(answer.status == 201 && !answer.is_replay(), "{key}");
    }
    assert_eq!(rig.db.keys().await, 6);
}

/// K10
#[actix_web::test]
async fn safe_methods_are_never_stored_nor_replayed() {
    let rig = Rig::builder().serve(any).await;
    for (round, method) in [Method::GET, Method::HEAD, Method::OPTIONS].into_iter().enumerate() {
        for turn in 0..2 {
            let answer = rig.request(method.clone(), "/any").key("x").answer().await;
            assert_eq!(answer.status, 200, "{method}");
            assert_eq!(answer.header("x-count"), Some((2 * round + turn + 1).to_string().as_str()), "{method}");
            assert!(!answer.is_replay());
        }
    }
    assert_eq!(rig.db.keys().await, 0);
}

/// K10
#[actix_web::test]
async fn a_list_read_with_a_key_is_fresh_every_time() {
    let rig = Rig::start().await;
    let before = rig.get("/orders").key("x").answer().await;
    let order = rig.post("/orders").key("x").json(&order("x")).answer().await;
    let after = rig.get("/orders").key("x").answer().await;
    assert_eq!(before.json(), serde_json::json!([]));
    assert_eq!(after.json(), serde_json::json!([order.json()["id"]]));
    // The key of the POST is another one's business.
    assert_eq!(rig.db.keys().await, 1);
}

/// K10
#[actix_web::test]
async fn put_and_delete_are_unprotected_until_the_policy_names_them() {
    let rig = Rig::builder().serve(any).await;
    for method in [Method::PUT, Method::DELETE] {
        for _ in 0..2 {
            assert!(!rig.request(method.clone(), "/any").key("x").answer().await.is_replay());
        }
    }
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (0, 4));

    let policy = Policy::new().anonymous().methods([http::Method::PUT, http::Method::DELETE]);
    let rig = Rig::builder().policy(policy).serve(any).await;
    for method in [Method::PUT, Method::DELETE] {
        let first = rig.request(method.clone(), "/any").key("x").answer().await;
        first.assert_replayed_by(&rig.request(method, "/any").key("x").answer().await);
    }
    for _ in 0..2 {
        assert!(!rig.post("/any").key("x").answer().await.is_replay());
    }
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (2, 4));
}

#[actix_web::test]
async fn post_and_patch_are_protected_by_default() {
    let rig = Rig::builder().serve(any).await;
    for method in [Method::POST, Method::PATCH] {
        let first = rig.request(method.clone(), "/any").key("x").answer().await;
        first.assert_replayed_by(&rig.request(method, "/any").key("x").answer().await);
    }
    // The method is part of the resource.
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (2, 2));
}
