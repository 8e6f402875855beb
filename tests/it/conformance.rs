//! The command that judges a service by the IETF draft: the shop passes, and what does not keep to the draft fails in
//! the rows that say so.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use actix_web::{
    App, HttpRequest, HttpResponse, HttpServer,
    dev::ServerHandle,
    http::StatusCode,
    rt::{spawn, time::sleep},
    web::{self, Data, ServiceConfig},
};
use tokio::process::Command;

use crate::support::{
    db::Db,
    example::{Example, build},
};

struct Report {
    status: Option<i32>,
    text: String,
}

impl Report {
    async fn of(url: &str, options: &[&str]) -> Self {
        let output = Command::new(build("conformance")).arg(url).args(options).output().await.unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        Self { status: output.status.code(), text }
    }

    /// The requirements with this verdict.
    fn rows(&self, verdict: &str) -> Vec<&str> {
        let cells = self.text.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()));
        cells
            .map(Iterator::collect::<Vec<_>>)
            .filter(|row| row.len() == 4 && row[2] == verdict)
            .map(|row| row[1])
            .collect()
    }
}

/// A service of the test's own.
struct Service {
    url: String,
    handle: ServerHandle,
}

impl Service {
    fn start(routes: impl Fn(&mut ServiceConfig) + Clone + Send + 'static) -> Self {
        let server = HttpServer::new(move || App::new().configure(routes.clone()))
            .workers(2)
            .disable_signals()
            .bind(("127.0.0.1", 0))
            .unwrap();
        let url = format!("http://{}/orders", server.addrs()[0]);
        let running = server.run();
        let handle = running.handle();
        spawn(running);
        Self { url, handle }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.handle.stop(false));
    }
}

fn fails(request: &HttpRequest) -> bool {
    request.headers().contains_key("x-demo-fail")
}

#[actix_web::test]
async fn the_shop_passes_every_row() {
    let db = Db::empty().await;
    let shop = Example::start("shop", &db.url, &[]);
    let report = Report::of(&shop.url("/orders"), &[]).await;
    assert_eq!(report.status, Some(0), "{}", report.text);
    assert!(report.rows("FAIL").is_empty(), "{}", report.text);
    // Keys are optional in the shop; and actix has no HEAD where a route is a GET.
    let not_applicable =
        ["a missing key is refused with 400 where one is required", "HEAD is unaffected by keys, readable or not"];
    assert_eq!(report.rows("not applicable"), not_applicable, "{}", report.text);
    assert_eq!(report.rows("pass").len(), 22, "{}", report.text);
    // Each operation that was accepted is one order: two keys to begin with, the twenty, the reset, the failure, the one
    // without a key, and bob's.
    assert_eq!(db.number("SELECT count(*) AS value FROM orders").await, 7, "{}", report.text);
}

#[actix_web::test]
async fn a_shop_that_holds_its_keys_by_leases_passes_too_and_keys_may_be_bare() {
    let db = Db::empty().await;
    let shop = Example::start("shop", &db.url, &[("LEASE_SECONDS", "30")]);
    let report = Report::of(&shop.url("/orders"), &["--bare"]).await;
    assert_eq!(report.status, Some(0), "{}", report.text);
    assert_eq!(report.rows("pass").len(), 22, "{}", report.text);
}

/// Every request is an order.
#[actix_web::test]
async fn a_service_without_idempotency_fails() {
    let orders = Arc::new(AtomicUsize::new(0));
    let service = Service::start(move |config| {
        let orders = Arc::clone(&orders);
        let create = move |request: HttpRequest| {
            let order = orders.fetch_add(1, Ordering::SeqCst);
            async move {
                if fails(&request) {
                    return HttpResponse::InternalServerError().finish();
                }
                HttpResponse::Created().json(order)
            }
        };
        config.route("/orders", web::post().to(create));
        config.route("/orders", web::get().to(HttpResponse::Ok));
    });
    let report = Report::of(&service.url, &["--required"]).await;
    assert_eq!(report.status, Some(1), "{}", report.text);
    let failing = [
        "a retry gets the first answer, byte for byte",
        "a replay is marked",
        "the same key with another body is refused with 422",
        "which leaves the first answer as it was",
        "of 20 at the same time one runs, the others get 409 or its answer",
        "whoever loses the connection gets one answer by retrying",
        "a retry after a failure runs, or repeats it; then that stays",
        "a missing key is refused with 400 where one is required",
        "an empty key is refused with 400",
        "a quoted string without an end is refused with 400",
        "a key that is not ASCII is refused with 400",
        "a key of 2,000 characters is refused with 400",
        "a request with two keys is refused with 400",
    ];
    assert_eq!(report.rows("FAIL"), failing, "{}", report.text);
}

/// `None` while the request runs.
type Answers = Data<Mutex<HashMap<Vec<u8>, Option<usize>>>>;

/// What is often written by hand: a map by the key alone.
async fn by_hand(request: HttpRequest, answers: Answers) -> HttpResponse {
    let Some(key) = request.headers().get("idempotency-key").map(|key| key.as_bytes().to_vec()) else {
        return HttpResponse::BadRequest().body("no key");
    };
    let order = {
        let mut answers = answers.lock().unwrap();
        let order = answers.len();
        match answers.get(&key) {
            Some(Some(order)) => return HttpResponse::Created().json(order),
            Some(None) => return HttpResponse::Conflict().body("running"),
            None => answers.insert(key.clone(), None),
        };
        order
    };
    if request.headers().contains_key("x-demo-slow-ms") {
        sleep(Duration::from_secs(2)).await;
    }
    if fails(&request) {
        return HttpResponse::InternalServerError().finish();
    }
    answers.lock().unwrap().insert(key, Some(order));
    HttpResponse::Created().json(order)
}

#[actix_web::test]
async fn a_map_by_the_key_alone_fails_where_it_falls_short() {
    let answers = Answers::default();
    let service = Service::start(move |config| {
        let keyed = |request: HttpRequest| async move {
            match request.headers().contains_key("idempotency-key") {
                true => HttpResponse::Conflict().finish(),
                false => HttpResponse::Ok().finish(),
            }
        };
        config
            .app_data(answers.clone())
            .service(web::resource("/orders").route(web::post().to(by_hand)).route(web::get().to(keyed)));
    });
    let report = Report::of(&service.url, &["--required", "--patience", "2"]).await;
    assert_eq!(report.status, Some(1), "{}", report.text);
    let failing = [
        "a replay is marked",
        "the same key with another body is refused with 422",
        "the 409 says when to retry",
        "a retry after a failure runs, or repeats it; then that stays",
        "an empty key is refused with 400",
        "a quoted string without an end is refused with 400",
        "a key that is not ASCII is refused with 400",
        "a key of 2,000 characters is refused with 400",
        "a request with two keys is refused with 400",
        "the same key of another user is another key",
        "GET is unaffected by keys, readable or not",
        "the 400 is described: problem+json, or a Link",
        "the 409 is described: problem+json, or a Link",
        "the 400 and the 422 link to documentation",
    ];
    let mut failed = report.rows("FAIL");
    // Where the handler has begun, it is dropped and its key stays taken; but the reset may overtake the request.
    failed.retain(|row| *row != "whoever loses the connection gets one answer by retrying");
    assert_eq!(failed, failing, "{}", report.text);
}

#[actix_web::test]
async fn a_specification_that_is_not_there_or_says_nothing_of_expiry_fails() {
    for (status, failing) in
        [(StatusCode::NOT_FOUND, "the specification is published there"), (StatusCode::OK, "it tells of expiry")]
    {
        let service = Service::start(move |config| {
            let create = |request: HttpRequest| async move {
                match request.headers().get_all("idempotency-key").count() {
                    1 => HttpResponse::Created().body("made"),
                    _ => HttpResponse::BadRequest()
                        .insert_header(("link", "</docs>; rel=\"describedby\""))
                        .body("one key, please"),
                }
            };
            let docs = move || async move { HttpResponse::build(status).body("Send a key.") };
            config.route("/orders", web::post().to(create)).route("/docs", web::get().to(docs));
        });
        let report = Report::of(&service.url, &[]).await;
        assert!(report.rows("FAIL").contains(&failing), "{}", report.text);
        assert!(report.rows("pass").contains(&"the 400 is described: problem+json, or a Link"), "{}", report.text);
        // Every answer is the same, which proves nothing.
        let untold = "a retry gets the first answer, byte for byte";
        assert!(report.rows("not applicable").contains(&untold), "{}", report.text);
    }
}

#[actix_web::test]
async fn what_cannot_be_judged_is_said_and_is_no_pass() {
    let service = Service::start(|config| {
        config.route("/orders", web::post().to(HttpResponse::Forbidden));
    });
    for (url, options, words) in [
        (service.url.as_str(), &[][..], "the first request got 403 Forbidden"),
        (service.url.as_str(), &["--no-such"][..], "usage: conformance URL"),
        (service.url.as_str(), &["--header"][..], "--header wants a value"),
        ("https://localhost/orders", &[][..], "there is no TLS"),
        ("http://alice:secret@localhost/orders", &[][..], "belongs into --header"),
    ] {
        let report = Report::of(url, options).await;
        assert_eq!(report.status, Some(2), "{}", report.text);
        assert!(report.text.contains(words), "{}", report.text);
    }
}
