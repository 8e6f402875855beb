//! Whose key it is, how much a client may make the service hold, and what stays out of the logs.

use std::{cell::Cell, io::Write, pin::pin, time::Duration};

use actix_idempotency::{Idempotency, PgPool, Policy, PoolBuilder};
use actix_web::{
    Error, HttpMessage, HttpRequest, HttpResponse, Result,
    body::{BoxBody, MessageBody},
    dev::{ServiceRequest, ServiceResponse},
    middleware::{Next, from_fn},
    rt::{spawn, time::timeout},
    web::{self, Bytes, Data, ServiceConfig},
};
use flate2::{Compression, write::GzEncoder};
use futures_util::{
    future::{
        Either::{Left, Right},
        join_all, select,
    },
    stream,
};
use reqwest::RequestBuilder;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{
    PATIENCE,
    app::{created, effect, order, routes},
    client::{Answer, RequestExt, client, post},
    db::{Db, server_url, with_database},
    eventually,
    gate::Gate,
    log,
    process::{ServerProcess, Setup},
    rig::{Rig, Server},
};

/// Z01
#[actix_web::test]
async fn the_same_key_of_another_user_is_another_key() {
    let rig = Rig::with(Policy::new()).await;
    let post =
        |user: &'static str, sku: &'static str| rig.post("/orders").key("x").user(user).json(&order(sku)).answer();
    let a = post("a", "x").await;
    let b = post("b", "x").await;
    assert!(a.status == 201 && b.status == 201 && !b.is_replay());
    assert_ne!(a.json()["id"], b.json()["id"]);
    a.assert_replayed_by(&post("a", "x").await);
    b.assert_replayed_by(&post("b", "x").await);
    // Another request under that key tells nobody but its owner that the key is used.
    assert_eq!(post("a", "y").await.code(), "key-reused");
    let c = post("c", "y").await;
    assert!(c.status == 201 && !c.is_replay());
    assert_eq!(rig.db.all_effects().await, 3);
}

/// Z01
#[actix_web::test]
async fn the_credential_decides_whose_key_it_is_and_is_not_stored() {
    let rig = Rig::with(Policy::new()).await;
    let post = |authorization: &'static str| {
        rig.post("/orders").key("x").header("authorization", authorization).json(&order("x")).answer()
    };
    let bearer = post("Bearer c2VjcmV0").await;
    for same in ["bearer c2VjcmV0", "BEARER   c2VjcmV0"] {
        bearer.assert_replayed_by(&post(same).await);
    }
    for other in ["Basic c2VjcmV0", "Bearer C2VJCMV0", "Bearer c2VjcmV0 x"] {
        assert!(!post(other).await.is_replay(), "{other}");
    }
    assert_eq!(rig.db.keys().await, 4);
    let shown = rig.db.text("SELECT string_agg(k::text, ' ') AS value FROM idempotency_keys AS k").await.unwrap();
    assert!(!shown.to_lowercase().contains("c2vjcmv0"), "{shown}");
}

/// Z02
#[actix_web::test]
async fn whoever_names_nobody_is_refused_where_the_policy_says_so() {
    let rig = Rig::with(Policy::new().refuse_anonymous()).await;
    for authorization in [None, Some("Digest username=\"a\""), Some("Bearer"), Some("")] {
        let mut request = rig.post("/orders").key("x").json(&order("x"));
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let refused = request.answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (401, "principal-missing"), "{authorization:?}");
    }
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (0, 0));
    assert_eq!(rig.post("/orders").key("x").user("a").json(&order("x")).answer().await.status, 201);
    // Without a key there is nothing to own.
    assert_eq!(rig.post("/orders").json(&order("x")).answer().await.status, 201);
}

/// Z02
#[actix_web::test]
async fn a_closure_tells_sessions_apart() {
    let session = |request: &HttpRequest| Some(request.headers().get("x-session")?.to_str().ok()?.to_owned());
    let rig = Rig::with(Policy::new().principal(session).refuse_anonymous()).await;
    let post =
        |session: &'static str| rig.post("/orders").key("x").header("x-session", session).json(&order("x")).answer();
    let (one, two) = (post("1").await, post("2").await);
    assert!(one.status == 201 && two.status == 201 && !two.is_replay());
    one.assert_replayed_by(&post("1").await);
    assert_eq!(rig.db.effects("x").await, 2);
    // It replaces the credential.
    let refused = rig.post("/orders").key("x").user("a").json(&order("x")).answer().await;
    assert_eq!(refused.code(), "principal-missing");
}

/// Z02
#[actix_web::test]
async fn all_who_name_nobody_share_their_keys_where_that_is_allowed() {
    let rig = Rig::start().await;
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    let other = rig.post("/orders").key("x").header("cookie", "session=2").json(&order("x")).answer().await;
    first.assert_replayed_by(&other);
    assert!(rig.db.is("(SELECT principal IS NULL FROM idempotency_keys)").await);
}

/// Z05
#[actix_web::test]
async fn the_same_key_for_another_tenant_is_another_key() {
    let tenant = |request: &HttpRequest| Some(request.headers().get("x-tenant")?.to_str().ok()?.to_owned());
    let rig = Rig::with(Policy::new().tenant(tenant)).await;
    let post = |tenant: Option<&'static str>, user: &'static str| {
        let request = rig.post("/orders").key("x").user(user).json(&order("x"));
        tenant.into_iter().fold(request, |request, tenant| request.header("x-tenant", tenant)).answer()
    };
    let mut answers = Vec::new();
    for tenant in [None, Some("1"), Some("2")] {
        for user in ["a", "b"] {
            let answer = post(tenant, user).await;
            assert!(answer.status == 201 && !answer.is_replay());
            answers.push((tenant, user, answer));
        }
    }
    for (tenant, user, answer) in answers {
        answer.assert_replayed_by(&post(tenant, user).await);
    }
    assert_eq!((rig.db.effects("x").await, rig.db.keys().await), (6, 6));
    // The row is unique by the digest of all of them.
    assert_eq!(rig.db.number("SELECT count(DISTINCT id) AS value FROM idempotency_keys").await, 6);
}

/// Lets in whoever has a name, and tells the handlers which.
async fn authenticate(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    match token.map(str::to_owned) {
        Some(user) => {
            request.extensions_mut().insert(User(user));
            Ok(next.call(request).await?.map_into_boxed_body())
        }
        None => Ok(request.into_response(HttpResponse::Unauthorized().body("who are you?"))),
    }
}

struct User(String);

/// Z03
#[actix_web::test]
async fn authentication_outside_answers_before_there_is_a_row() {
    let user = |request: &HttpRequest| request.extensions().get::<User>().map(|user| user.0.clone());
    let rig = Rig::builder()
        .policy(Policy::new().principal(user).refuse_anonymous())
        .serve(|config, idempotency, _| {
            let idempotency = idempotency.clone();
            let outside = web::scope("").wrap(from_fn(authenticate));
            config.service(outside.configure(move |config| routes(config, &idempotency)));
        })
        .await;
    let stranger = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert_eq!((stranger.status.as_u16(), rig.db.keys().await), (401, 0));
    let first = rig.post("/orders").key("x").user("a").json(&order("x")).answer().await;
    assert_eq!(first.status, 201);
    // Not for the key of somebody else, either.
    let stranger = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert_eq!((stranger.status.as_u16(), stranger.text().as_str()), (401, "who are you?"));
    first.assert_replayed_by(&rig.post("/orders").key("x").user("a").json(&order("x")).answer().await);
    assert_eq!((rig.db.effects("x").await, rig.db.keys().await), (1, 1));
    assert!(rig.db.is("(SELECT principal = 'a' FROM idempotency_keys)").await);
}

/// As [`authenticate`], by a list.
async fn knows_alice(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    if request.headers().get("authorization").is_none_or(|token| token != "Bearer alice") {
        return Ok(request.into_response(HttpResponse::Unauthorized().body("who are you?")));
    }
    authenticate(request, next).await
}

/// Z03
#[actix_web::test]
async fn authentication_inside_by_mistake_tells_nobody_what_is_stored_for_another() {
    let user = |request: &HttpRequest| request.extensions().get::<User>().map(|user| user.0.clone());
    let by_closure = || Policy::new().principal(user);
    for (policy, stored) in [(by_closure(), false), (by_closure().atomic(), false), (Policy::new(), true)] {
        let rig = Rig::builder()
            .policy(policy)
            .serve(|config, idempotency, _| {
                let inside = web::scope("").wrap(from_fn(knows_alice)).wrap(idempotency.clone());
                config.service(inside.route("/x", web::post().to(sells)));
            })
            .await;
        let post = |user: &'static str| rig.post("/x").key("x").user(user).body("tea").answer();
        let alice = post("alice").await;
        assert_eq!(alice.status.as_u16(), if stored { 201 } else { 401 });
        for key in ["x", "another"] {
            let nobody = rig.post("/x").key(key).user("nonsense").body("tea").answer().await;
            assert_eq!((nobody.status.as_u16(), nobody.is_replay()), (401, false), "{}", nobody.text());
            assert!(!nobody.text().contains("alice's"));
        }
        assert_eq!(post("alice").await.is_replay(), stored);
        assert_eq!(rig.db.effects("sold").await, i64::from(stored));
        // Whoever set this up finds out with the first request.
        assert!(stored || (alice.code() == "principal-missing" && rig.db.keys().await == 0));
    }
}

async fn sells(pool: Data<PgPool>) -> Result<HttpResponse> {
    effect(&pool, "sold").await?;
    Ok(HttpResponse::Created().body("alice's order"))
}

/// Z02
#[actix_web::test]
async fn a_principal_closure_that_finds_nobody_refuses_unless_anonymous_is_said() {
    let session = |request: &HttpRequest| Some(request.headers().get("x-session")?.to_str().ok()?.to_owned());
    let rig = Rig::with(Policy::new().principal(session)).await;
    let open = rig.twin(Policy::new().principal(session).anonymous());
    let ask = |request: RequestBuilder| request.key("x").json(&order("x")).answer();
    let refused = ask(rig.post("/orders")).await;
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (401, "principal-missing"));
    // A credential is not what the closure asks for, nor does it matter in which order they are named.
    assert_eq!(ask(rig.post("/orders").user("a")).await.code(), "principal-missing");
    let earlier = rig.twin(Policy::new().anonymous().principal(session));
    let shared = ask(open.post("/orders")).await;
    assert_eq!(shared.status, 201);
    shared.assert_replayed_by(&ask(earlier.post("/orders")).await);
    assert_eq!(ask(rig.post("/orders").header("x-session", "1")).await.status, 201);
    // Without a key there is nothing to own.
    assert_eq!(rig.post("/orders").json(&order("x")).answer().await.status, 201);
    assert_eq!(rig.db.keys().await, 2);
}

/// Z03
#[actix_web::test]
async fn authorisation_inside_is_not_asked_again_for_a_replay() {
    async fn handler(pool: Data<PgPool>, request: HttpRequest) -> Result<HttpResponse> {
        if request.headers().get("x-role").is_none_or(|role| role != "buyer") {
            return Ok(HttpResponse::Forbidden().finish());
        }
        Ok(created(effect(&pool, "x").await?))
    }
    let rig = Rig::builder().policy(Policy::new()).handler(handler).await;
    let post = |role: &'static str| rig.post("/x").key("x").user("a").header("x-role", role).answer();
    assert_eq!(post("guest").await.status, 403);
    let first = post("buyer").await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&post("guest").await);
}

/// Z08
#[actix_web::test]
async fn a_body_may_be_as_large_as_the_limit_and_no_larger() {
    const LIMIT: usize = 64 * 1024;
    async fn handler(pool: Data<PgPool>, body: Bytes) -> Result<HttpResponse> {
        effect(&pool, &body.len().to_string()).await?;
        Ok(HttpResponse::Created().finish())
    }
    let rig = Rig::builder().policy(Policy::new().anonymous().request_limit(LIMIT)).handler(handler).await;
    let chunked = |size: usize| {
        let chunks = (0..size).step_by(1000).map(move |at| Ok::<_, std::io::Error>(vec![0; 1000.min(size - at)]));
        reqwest::Body::wrap_stream(stream::iter(chunks))
    };
    for (key, body, status) in [
        ("sized", reqwest::Body::from(vec![0; LIMIT]), 201),
        ("chunked", chunked(LIMIT), 201),
        ("sized-over", reqwest::Body::from(vec![0; LIMIT + 1]), 413),
        ("chunked-over", chunked(LIMIT + 1), 413),
        ("empty", reqwest::Body::from(""), 201),
    ] {
        let answer = rig.post("/x").key(key).body(body).answer().await;
        assert_eq!(answer.status, status, "{key}");
        if status == 413 {
            assert_eq!(answer.code(), "body-too-large");
            assert_eq!(rig.db.state(key).await, None, "nothing is claimed");
        }
    }
    assert_eq!(rig.db.effects(&LIMIT.to_string()).await, 2);
    assert_eq!(rig.db.all_effects().await, 3);
}

/// Z08
#[actix_web::test]
async fn a_length_that_is_announced_is_refused_before_the_body_comes() {
    let rig = Rig::with(Policy::new().anonymous().request_limit(1000)).await;
    for length in ["1001", "104857600", "18446744073709551615"] {
        let mut raw = rig.raw().await;
        let head =
            format!("POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: x\r\ncontent-length: {length}\r\n\r\n");
        raw.send(head).await.unwrap();
        let refused = raw.answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (413, "body-too-large"), "{length}");
    }
    assert_eq!(rig.db.keys().await, 0);
}

/// The most memory that a process has had so far, in MiB.
#[cfg(target_os = "linux")]
fn peak(server: &ServerProcess) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Sends 100 MiB in chunks, until there is an answer. What it is, and how many MiB were sent by then.
#[cfg(target_os = "linux")]
async fn upload(server: &ServerProcess, key: &str) -> (String, usize) {
    let (mut reader, mut writer) = TcpStream::connect(server.address).await.unwrap().into_split();
    let head = format!(
        "POST /slow?ms=0 HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let sent = Cell::new(0);
    let writing = async {
        let chunk = [b"100000\r\n".to_vec(), vec![b'x'; 0x10_0000], b"\r\n".to_vec()].concat();
        writer.write_all(head.as_bytes()).await?;
        while sent.get() < 100 {
            writer.write_all(&chunk).await?;
            sent.set(sent.get() + 1);
        }
        writer.write_all(b"0\r\n\r\n").await
    };
    let mut answer = vec![0; 12];
    let reading = timeout(PATIENCE, reader.read_exact(&mut answer));
    let read = match select(pin!(reading), pin!(writing)).await {
        Left((read, _)) => read,
        // It does not read on, or it has read all of it.
        Right((_, reading)) => reading.await,
    };
    read.expect("an answer in time").unwrap();
    (String::from_utf8_lossy(&answer).into_owned(), sent.get())
}

/// Z08
#[cfg(target_os = "linux")]
#[actix_web::test]
async fn memory_stays_flat_whatever_is_uploaded() {
    let db = Db::new().await;
    let server = Setup::new(&db.url).start();
    assert_eq!(client().post(server.url("/orders")).key("x").json(&order("x")).answer().await.status, 201);
    let before = peak(&server);
    let uploads = (0..4).map(|n| format!("upload-{n}")).collect::<Vec<_>>();
    for (answer, sent) in join_all(uploads.iter().map(|key| upload(&server, key))).await {
        assert_eq!(answer, "HTTP/1.1 413");
        assert!(sent < 50, "{sent} MiB");
    }
    // 64 MiB of blanks, in 300 KB: the extractor that decodes it has a limit of its own.
    let mut bomb = GzEncoder::new(Vec::new(), Compression::fast());
    let blanks = vec![b' '; 0x10_0000];
    (0..64).for_each(|_| bomb.write_all(&blanks).unwrap());
    let bomb = bomb.finish().unwrap();
    let bombs = (0..4).map(|n| {
        let request = client().post(server.url("/orders")).key(&format!("bomb-{n}"));
        let request = request.header("content-type", "application/json").header("content-encoding", "gzip");
        request.body(bomb.clone()).answer()
    });
    assert!(join_all(bombs).await.iter().all(|answer| answer.status == 413));
    let grown = peak(&server) - before;
    assert!(grown < 100, "{grown} MiB for 656 MiB");
    assert_eq!(db.all_effects().await, 1);
    assert_eq!(db.number("SELECT count(*) AS value FROM idempotency_keys WHERE key LIKE 'upload%'").await, 0);
}

/// Where somebody could learn it from: all that has been logged so far.
#[track_caller]
fn assert_unheard(secrets: &[&str]) {
    for line in log::all() {
        let text = format!("{line:?}");
        for secret in secrets {
            assert!(!text.contains(secret), "{text}");
        }
    }
}

#[actix_web::test]
async fn no_secret_is_logged_whatever_happens_to_a_request() {
    log::listen();
    let rig = Rig::with(Policy::new().tenant(|_| Some("SecretTenant".into())).store_timeout(PATIENCE)).await;
    let send = async |path: &str, key: &str, body: &str| -> Answer {
        rig.post(path).key(key).user("SecretToken").header("x-own", "SecretHeader").body(body.to_owned()).answer().await
    };
    // First and retry, outstanding, another request, failures of the handler.
    for key in ["SecretKey-1", "SecretKey-1", "\"SecretKey-1\"", "SecretKey-1;"] {
        send("/slow?ms=0", key, "SecretBody").await;
    }
    assert_eq!(send("/slow?ms=0", "SecretKey-1", "SecretOther").await.status, 422);
    let held = spawn(rig.post("/held").key("SecretKey-2").user("SecretToken").body("SecretBody").answer());
    rig.gate.entered(1).await;
    assert_eq!(send("/held", "SecretKey-2", "SecretBody").await.status, 409);
    rig.gate.open(1);
    held.await.unwrap();
    for mode in ["err", "panic", "r500", "r400"] {
        send(&format!("/flaky?mode={mode}"), &format!("SecretKey-{mode}"), "SecretBody").await;
    }
    let mut raw = rig.raw().await;
    raw.send(post("/orders", "SecretKey\u{1}", "SecretBody")).await.unwrap();
    raw.head().await;
    // The store refuses the claim, and the answer: in its own log it shows the whole row.
    rig.db
        .run(
            "ALTER TABLE idempotency_keys ADD CONSTRAINT no_claim CHECK (key <> 'SecretKey-3'), \
             ADD CONSTRAINT no_answer CHECK (key <> 'SecretKey-4' OR status IS NULL)",
        )
        .await;
    assert_eq!(send("/slow?ms=0", "SecretKey-3", "SecretBody").await.status, 503);
    assert_eq!(send("/slow?ms=0", "SecretKey-4", "SecretBody").await.status, 201);
    let id = rig.db.id("SecretKey-4").await;
    eventually("it has given up", async || log::count(&id, "completion-lost") == 1).await;

    assert_unheard(&["SecretKey", "SecretToken", "SecretBody", "SecretOther", "SecretHeader", "SecretTenant"]);
    // It was listening.
    assert!(log::count(&rig.db.id("SecretKey-1").await, "replayed") >= 2);
    assert!(log::all().iter().any(|line| format!("{line:?}").contains("no_claim")));
}

#[actix_web::test]
async fn the_password_of_the_database_is_not_logged_nor_shown() {
    log::listen();
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    let mut texts = Vec::new();
    for url in [
        format!("postgres://SecretUser:SecretPassword@{closed}/shop"),
        format!("{}?password=SecretPassword&user=it_no_such_role", with_database(&server_url(), "it_no_such_database")),
    ] {
        let pool = PoolBuilder::new(&url).build().unwrap();
        let policy = Policy::new().anonymous().store_timeout(Duration::from_millis(300));
        let idempotency = Idempotency::postgres(pool.clone()).with(policy);
        texts.push(format!("{:?} {:?}", idempotency.check().await.unwrap_err(), idempotency));
        let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| routes(config, idempotency);
        let server = Server::start(2, pool, idempotency, Gate::new(), routes);
        let refused = client().post(server.url("/orders")).key("dsn").json(&json!({})).answer().await;
        assert_eq!(refused.code(), "store-unavailable");
        texts.push(refused.text());
        texts.push(format!("{:?}", actix_idempotency::migrations::run(&url).await.unwrap_err()));
    }
    assert!(texts.iter().all(|text| !text.contains("SecretPassword")), "{texts:?}");
    assert_unheard(&["SecretPassword"]);
    assert!(log::all().iter().any(|line| line.get("event") == Some("store-unavailable")));
}
