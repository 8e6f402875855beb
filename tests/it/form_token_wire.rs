//! Where a request carries its form token, and what it may look like there.

use actix_idempotency::Policy;
use proptest::{prelude::*, strategy::ValueTree};
use reqwest::RequestBuilder;

use crate::support::{
    client::{Answer, RequestExt},
    forms::{FORM, Forms, assert_first, assert_refused, rig},
    rig::Rig,
};

/// A form as browsers send it; a field with a file name is a file.
fn multipart(boundary: &str, fields: &[(&str, Option<&str>, &str)]) -> String {
    let mut body = String::new();
    for (name, file, value) in fields {
        let file = file.map(|file| format!("; filename=\"{file}\"\r\ncontent-type: application/octet-stream"));
        let file = file.unwrap_or_default();
        body += &format!("--{boundary}\r\ncontent-disposition: form-data; name=\"{name}\"{file}\r\n\r\n{value}\r\n");
    }
    body + &format!("--{boundary}--\r\n")
}

fn upload(rig: &Rig, path: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
    rig.post(path).header("x-user", "alice").header("content-type", "multipart/form-data; boundary=xx").body(body)
}

async fn with_body(rig: &Rig, body: impl Into<reqwest::Body>) -> Answer {
    rig.post("/order").header("x-user", "alice").header("content-type", FORM).body(body).answer().await
}

#[actix_web::test]
async fn a_token_twice_is_one_where_both_are_equal_and_refused_where_they_differ() {
    let rig = rig(Policy::new()).await;
    let other = rig.token("order").await;
    let bodies: [fn(&str, &str) -> String; 3] = [
        |one, two| format!("form_token={one}&sku=a&form_token={two}"),
        |one, two| format!("form_token={one},{two}&sku=a"),
        |one, two| format!("sku=a&form_token={one}%2C+{two}"),
    ];
    for body in bodies {
        let token = rig.token("order").await;
        assert_refused(&with_body(&rig, body(&token, &other)).await, 400, "token-invalid");
        assert_refused(&with_body(&rig, body(&token, "")).await, 400, "token-invalid");
        assert_first(&with_body(&rig, body(&token, &token)).await);
    }
    let token = rig.token("order").await;
    for header in [&other, "", ",", "x"] {
        let both = rig.submit(&token, "a").header("form-token", header).answer().await;
        assert_refused(&both, 400, "token-invalid");
    }
    let lines = |one: &str, two: &str| rig.submit(&token, "a").header("form-token", one).header("form-token", two);
    assert_refused(&lines(&token, &other).answer().await, 400, "token-invalid");
    assert_first(&lines(&token, &token).answer().await);
    assert!(rig.submit(&token, "a").header("form-token", format!("{token}, {token}")).answer().await.is_replay());
    // Not one of the other's was used up.
    assert_first(&rig.submit(&other, "a").answer().await);
}

#[actix_web::test]
async fn a_script_sends_the_token_in_a_header_beside_any_body() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("upload").await;
    let send = |token: &str| rig.post("/upload").header("x-user", "alice").header("form-token", token);
    let first = send(&token).json(&serde_json::json!({"form_token": "no field of a form"})).answer().await;
    assert_first(&first);
    first.assert_replayed_by(
        &send(&token).json(&serde_json::json!({"form_token": "no field of a form"})).answer().await,
    );
    assert_refused(&send(&token).json(&2).answer().await, 409, "token-used");
    // A form that cannot be read, and a header that can.
    for (content_type, encoding) in [(FORM, "gzip"), ("multipart/form-data; boundary=x", "identity")] {
        let broken = || send("").header("content-type", content_type).header("content-encoding", encoding).body("--x");
        let mut request = broken().build().unwrap();
        request.headers_mut().remove("form-token");
        let answer = RequestBuilder::from_parts(rig.client.clone(), request).answer().await;
        assert_refused(&answer, 400, "token-invalid");
    }
    let token = rig.token("upload").await;
    let broken = send(&token).header("content-type", "multipart/form-data; boundary=x").body("--y");
    assert_first(&broken.answer().await);
}

/// K06
#[actix_web::test]
async fn what_is_no_token_is_told_so_and_leaves_no_row() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("order").await;
    let forged = format!("{}{}", &token[..123], if token.ends_with('A') { 'B' } else { 'A' });
    let unknown = format!("AQ{}", "A".repeat(122));
    for (text, status, code) in [
        ("", 400, "token-invalid"),
        ("a\0b", 400, "token-invalid"),
        ("a\r\nb", 400, "token-invalid"),
        (" ", 400, "token-invalid"),
        ("ü", 400, "token-invalid"),
        (&token[1..], 400, "token-invalid"),
        (&format!("{token}A"), 400, "token-invalid"),
        (&format!("{token}="), 400, "token-invalid"),
        (&format!("{token}\0"), 400, "token-invalid"),
        (&token.replace('A', "+"), 400, "token-invalid"),
        (&"A".repeat(100_000), 400, "token-invalid"),
        (&forged, 403, "token-forged"),
        (&unknown, 403, "token-unknown"),
    ] {
        assert_refused(&rig.submit(text, "a").answer().await, status, code);
    }
    assert_refused(&with_body(&rig, "form_token=a%00b&sku=a").await, 400, "token-invalid");
    assert_refused(&with_body(&rig, &b"form_token=\xff\xfe&sku=a"[..]).await, 400, "token-invalid");
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
    assert_first(&rig.submit(&token, "a").answer().await);
}

#[actix_web::test]
async fn a_multipart_form_carries_its_token_in_any_field_of_that_name() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("upload").await;
    let body = |token: &str| multipart("xx", &[("file", Some("a.bin"), "…\r\n--xy"), ("form_token", None, token)]);
    let first = upload(&rig, "/upload", body(&token)).answer().await;
    assert_first(&first);
    assert_eq!(first.text(), body(&token).len().to_string());
    // Another boundary, as every submit has.
    let again = multipart("yy", &[("file", Some("a.bin"), "…\r\n--xy"), ("form_token", None, &token)]);
    let again = upload(&rig, "/upload", again).header("content-type", "multipart/form-data; boundary=yy");
    let mut again = again.build().unwrap();
    again.headers_mut().insert("content-type", "multipart/form-data; boundary=yy".parse().unwrap());
    first.assert_replayed_by(&RequestBuilder::from_parts(rig.client.clone(), again).answer().await);

    let other = rig.token("upload").await;
    let two = multipart("xx", &[("form_token", None, &other), ("form_token", None, &token)]);
    assert_refused(&upload(&rig, "/upload", two).answer().await, 400, "token-invalid");
    assert_refused(&upload(&rig, "/upload", multipart("xx", &[("a", None, "b")])).answer().await, 400, "token-missing");
    assert_first(&upload(&rig, "/upload", body(&other)).answer().await);
}

#[actix_web::test]
async fn an_upload_that_is_streamed_through_has_its_token_in_the_header_or_the_first_field() {
    const LARGE: usize = 8 * 1024 * 1024;
    let rig = rig(Policy::new()).await;
    let file = "x".repeat(LARGE);
    // Far above the request limit, which does not apply.
    let token = rig.token("stream").await;
    let body = multipart("xx", &[("form_token", None, &token), ("file", Some("a.bin"), &file)]);
    let first = upload(&rig, "/stream", body.clone()).answer().await;
    assert_first(&first);
    assert_eq!(first.text(), body.len().to_string());
    let again = upload(&rig, "/stream", body).answer().await;
    assert!(again.is_replay() && again.body == first.body, "{again:?}");

    let token = rig.token("stream").await;
    let late = multipart("xx", &[("file", Some("a.bin"), &file), ("form_token", None, &token)]);
    let refused = upload(&rig, "/stream", late).answer().await;
    assert_refused(&refused, 400, "token-missing");
    let by_header = || upload(&rig, "/stream", file.clone()).header("form-token", &token);
    let first = by_header().answer().await;
    assert_first(&first);
    assert_eq!(first.text(), LARGE.to_string());
    let again = by_header().answer().await;
    assert!(again.is_replay() && again.body == first.body, "{again:?}");
    assert_eq!(rig.db.all_effects().await, 2);
}

#[actix_web::test]
async fn the_first_field_of_a_stream_may_come_in_pieces_and_must_come() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("stream").await;
    let body = multipart("xx", &[("form_token", None, &token), ("file", Some("a"), "b")]);
    let head = |length: usize| {
        format!(
            "POST /stream HTTP/1.1\r\nhost: test\r\nx-user: alice\r\ncontent-length: {length}\r\n\
             content-type: multipart/form-data; boundary=\"xx\"\r\n\r\n"
        )
    };
    let mut raw = rig.raw().await;
    raw.send(head(body.len())).await.unwrap();
    for byte in body.as_bytes() {
        raw.send([*byte]).await.unwrap();
    }
    let answer = raw.answer().await;
    assert_eq!((answer.status.as_u16(), answer.text()), (201, body.len().to_string()));

    let token = rig.token("stream").await;
    let body = multipart("xx", &[("form_token", None, &token)]);
    for cut in [0, 10, body.len() / 2, body.len() - 30] {
        let mut raw = rig.raw().await;
        raw.send(head(body.len())).await.unwrap();
        raw.send(&body.as_bytes()[..cut]).await.unwrap();
        raw.finish().await;
        let answer = raw.answer().await;
        assert!(answer.status == 400, "{cut}: {answer:?}");
    }
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_hostile_form_is_refused_or_passed_on_and_never_a_panic() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("upload").await;
    let long = "x".repeat(20_000);
    let bodies = [
        String::new(),
        "--xx".into(),
        "--xx--".into(),
        "--xx\r\n\r\n".into(),
        "\n".into(),
        "--xx\r\ncontent-disposition: form-data; name=\"form_token\"\r\n\r\n".into(),
        format!("--xx\r\ncontent-disposition: form-data; name=\"form_token\"\r\n\r\n{token}"),
        format!("--xx\r\ncontent-disposition: form-data; name=form_token; name=\"a\"\r\n\r\n{token}\r\n--xx"),
        format!("--xx\r\n{long}: a\r\n\r\n{token}\r\n--xx--"),
        format!("--xx\r\n{}\r\n{token}\r\n--xx--", "a: b\r\n".repeat(100)),
        format!("--xx\r\ncontent-disposition: form-data; name=\"form_token\"\r\n\r\n{long}\r\n--xx--\r\n"),
        "--xx\r\n".repeat(10_000),
        multipart("xx", &vec![("form_token", None, "x"); 2_000]),
    ];
    for body in bodies {
        for path in ["/upload", "/stream"] {
            let refused = upload(&rig, path, body.clone()).answer().await;
            assert!(refused.code().starts_with("token-"), "{body:.80}: {refused:?}");
        }
    }
    for boundary in ["", "\"\"", "\"a b\"", "x; boundary=y", &"b".repeat(5000)] {
        let request = rig.post("/upload").header("x-user", "alice").body("--\r\n\n--\n");
        let refused =
            request.header("content-type", format!("multipart/form-data; boundary={boundary}")).answer().await;
        assert!(["token-invalid", "token-missing"].contains(&refused.code().as_str()), "{boundary:.80}: {refused:?}");
    }
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
}

/// Pieces of forms, in any order.
fn form() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"--xx".to_vec()),
        Just(b"--xx--".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"\r\n\r\n".to_vec()),
        Just(b"content-disposition: form-data; name=\"form_token\"".to_vec()),
        Just(b"content-disposition: form-data; name=".to_vec()),
        Just(b"content-transfer-encoding: base64".to_vec()),
        Just(b"form_token=".to_vec()),
        Just(b"&".to_vec()),
        Just("A".repeat(124).into_bytes()),
        proptest::collection::vec(any::<u8>(), 0..20),
    ];
    proptest::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat())
}

#[actix_web::test]
async fn no_form_without_a_token_is_let_through() {
    let rig = rig(Policy::new()).await;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..crate::support::repeat(3000, 150) {
        let body = form().new_tree(&mut runner).unwrap().current();
        for (path, content_type) in [
            ("/upload", FORM),
            ("/upload", "multipart/form-data; boundary=xx"),
            ("/stream", "multipart/form-data; boundary=xx"),
        ] {
            let request = rig.post(path).header("x-user", "alice").header("content-type", content_type);
            let answer = request.body(body.clone()).answer().await;
            assert!(
                [400, 403].contains(&answer.status.as_u16()) && answer.code().starts_with("token-"),
                "{:?}: {answer:?}",
                String::from_utf8_lossy(&body)
            );
        }
    }
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
}
