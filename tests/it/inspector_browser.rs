//! The inspector in a real browser.

use std::{env, fs, time::Duration};

use actix_idempotency::{Idempotency, Inspector, PgPool, Policy};
use actix_web::{
    HttpRequest, HttpResponse,
    dev::Service,
    http::header::{self, HeaderValue},
    rt::{spawn, time::sleep},
    web::{self, ServiceConfig},
};
use fantoccini::Locator;

use crate::support::{
    app::{self, order},
    browser::Browser,
    client::{Answer, RequestExt, client},
    db::Db,
    eventually,
    example::Example,
    rig::Rig,
};

/// A page of another site, with a form that somebody's browser sends.
async fn evil(form: web::Query<Vec<(String, String)>>) -> HttpResponse {
    let fields: String = form
        .iter()
        .filter(|(name, _)| name != "action")
        .map(|(name, value)| format!("<input type=hidden name={name} value={value}>"))
        .collect();
    let action = form.iter().find(|(name, _)| name == "action").unwrap().1.clone();
    let page = format!("<form method=post action=\"{action}\">{fields}<button>Win a prize</button></form>");
    HttpResponse::Ok().content_type("text/html; charset=utf-8").body(page)
}

async fn rig() -> Rig {
    let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        config.service(Inspector::new(idempotency).protected_elsewhere().scope("/idempotency"));
        config.route("/evil", web::get().to(evil));
        let scriptless = web::scope("/scriptless").wrap_fn(|request, pages| {
            let answering = pages.call(request);
            async {
                let mut answer = answering.await?;
                let no_script = HeaderValue::from_static("script-src 'none'");
                answer.headers_mut().append(header::CONTENT_SECURITY_POLICY, no_script);
                Ok(answer)
            }
        });
        config.service(scriptless.service(Inspector::new(idempotency).protected_elsewhere().scope("/idempotency")));
        app::routes(config, idempotency);
    };
    let header =
        |name: &'static str| move |request: &HttpRequest| request.headers().get(name)?.to_str().ok().map(str::to_owned);
    let policy = Policy::new().principal(header("x-user")).tenant(header("x-tenant"));
    Rig::builder().policy(policy).database(Db::read_committed().await).serve(routes).await
}

async fn ordered(rig: &Rig, key: &str) -> Answer {
    rig.post("/orders").key(key).header("x-user", "alice").json(&order("x")).answer().await
}

/// In pixels. Other tests of this process are in the plots too: the highest bar fills its plot, whoever's it is.
async fn highest_bar(browser: &Browser, event: &str) -> f64 {
    // All of them at once: the page makes new ones now and then.
    let highest = format!(
        "const bars = [...document.querySelectorAll('#event-{event} svg.plot rect')].map(bar => \
         bar.getBoundingClientRect()); return Math.max(0, ...bars.filter(bar => bar.width > 0.5).map(bar => bar.height))"
    );
    browser.execute(&highest, Vec::new()).await.unwrap().as_f64().unwrap()
}

#[actix_web::test]
async fn the_plots_show_the_search_finds_and_a_forced_release_works() {
    let Some(browser) = Browser::start().await else { return };
    let rig = rig().await;
    for key in ["k1", "k1", "k2"] {
        assert_eq!(ordered(&rig, key).await.status, 201);
    }
    let owner = spawn(rig.post("/held").key("stuck").header("x-user", "alice").body("x").answer());
    rig.gate.entered(1).await;

    browser.goto(&rig.server.url("/idempotency")).await.unwrap();
    browser.sees("Outstanding keys").await;
    assert!(browser.current_url().await.unwrap().path().ends_with("/idempotency/overview"));
    eventually("the plot is drawn", async || highest_bar(&browser, "replayed").await > 40.0).await;
    let ground = "return getComputedStyle(document.querySelector('svg.plot rect')).fill";
    assert_ne!(browser.execute(ground, Vec::new()).await.unwrap(), "rgb(0, 0, 0)", "the style sheet is applied");

    browser.fill_in("input[name=key]", "k1").await;
    browser.click("form.search button").await;
    browser.sees("1 found").await;
    browser.follow("k1").await;
    browser.sees("the answer is stored; a retry gets it").await;

    browser.follow("Overview").await;
    browser.sees("Outstanding keys").await;
    browser.follow("stuck").await;
    browser.sees("somebody runs it, and the lease is live").await;
    browser.follow("Force the release").await;
    browser.sees("a payment could be made twice").await;
    browser.click("main form button").await;
    browser.sees("the attempt that had the key stores nothing any more").await;
    assert_eq!(rig.db.state("stuck").await.as_deref(), Some("released"));
    rig.gate.open(1);
    assert_eq!(owner.await.unwrap().code(), "lease-lost");
}

#[actix_web::test]
async fn all_of_it_works_where_no_script_runs() {
    let Some(browser) = Browser::start().await else { return };
    let rig = rig().await;
    assert_eq!(ordered(&rig, "k1").await.status, 201);
    browser.goto(&rig.server.url("/scriptless/idempotency")).await.unwrap();
    browser.sees("Outstanding keys").await;
    assert!(!browser.text().await.contains("Live:"));
    eventually("the plot is drawn", async || highest_bar(&browser, "fresh").await > 40.0).await;
    browser.fill_in("input[name=key]", "k1").await;
    browser.click("form.search button").await;
    browser.sees("1 found").await;
    browser.follow("k1").await;
    browser.sees("the answer is stored").await;
    browser.follow("Expire").await;
    browser.sees("A late retry of it does it again.").await;
    browser.click("main form button").await;
    browser.sees("Expired: the next request with this key is a first one.").await;
    assert!(!ordered(&rig, "k1").await.is_replay());
}

#[actix_web::test]
async fn the_page_follows_by_itself_what_happens() {
    let Some(browser) = Browser::start().await else { return };
    let rig = rig().await;
    browser.goto(&rig.server.url("/idempotency/overview")).await.unwrap();
    browser.sees("Live: looks every 5 s.").await;
    // So that a reload of the page could be told.
    browser.execute("window.open_since_then = true", Vec::new()).await.unwrap();
    let owner = spawn(rig.post("/held").key("it-follows").header("x-user", "alice").body("x").answer());
    rig.gate.entered(1).await;
    browser.sees("it-follows").await;
    rig.gate.open(1);
    assert_eq!(owner.await.unwrap().status, 201);
    eventually("it is not outstanding any more", async || !browser.text().await.contains("it-follows")).await;
    // What somebody has come to by keyboard stays.
    browser
        .execute(
            "document.querySelector('[data-live]').tabIndex = 0; document.querySelector('[data-live]').focus()",
            Vec::new(),
        )
        .await
        .unwrap();
    browser.sees("Stands still while something of it is selected.").await;
    browser.execute("document.activeElement.blur()", Vec::new()).await.unwrap();
    browser.sees("Live: looks every 5 s.").await;
    assert_eq!(browser.execute("return window.open_since_then", Vec::new()).await.unwrap(), true);
    // The server goes, and the page says that it is not up to date.
    rig.server.handle.stop(false).await;
    browser.sees("Not live: the last look failed").await;
}

#[actix_web::test]
async fn hostile_names_run_no_script() {
    let Some(browser) = Browser::start().await else { return };
    let rig = rig().await;
    let key = "<script>document.title='run'</script><img/src=x/onerror=alert(1)>";
    let (user, tenant) = ("\"><script>document.title='run'</script>", "'><svg/onload=document.title='run'>");
    let ask = rig.post("/orders").key(key).header("x-user", user).header("x-tenant", tenant);
    assert_eq!(ask.json(&order("x")).answer().await.status, 201);
    rig.db.run("UPDATE idempotency_keys SET resource = E'</td><script>document.title=''run''</script> \\u202e☃'").await;
    rig.db.lapse(&key.replace('\'', "''")).await;
    let id = rig.db.text("SELECT encode(id, 'hex') AS value FROM idempotency_keys").await.unwrap();
    for page in [format!("key?id={id}"), "overview".into(), "search".into(), format!("release?id={id}")] {
        browser.goto(&rig.server.url(&format!("/idempotency/{page}"))).await.unwrap();
        browser.sees(key).await;
        browser.sees("☃").await;
        if page == "overview" {
            // It has been brought up to date by the script, too.
            rig.db.run("UPDATE idempotency_keys SET resource = resource || ' again'").await;
            browser.sees("☃ again").await;
        }
        assert!(!browser.title().await.unwrap().starts_with("run"), "{page}");
        assert!(browser.get_alert_text().await.is_err(), "{page}");
        for made in ["main script", "main img", "main svg:not(.plot)"] {
            assert!(browser.find(Locator::Css(made)).await.is_err(), "{page}: {made}");
        }
    }
}

/// The browser that is logged in there is led to another site, whose form it sends.
#[actix_web::test]
async fn a_form_of_another_site_does_nothing() {
    let Some(browser) = Browser::start().await else { return };
    let rig = rig().await;
    assert_eq!(ordered(&rig, "a").await.status, 201);
    let id = rig.db.text("SELECT encode(id, 'hex') AS value FROM idempotency_keys").await.unwrap();
    // Even one that knows what the page says.
    let question = client().get(rig.server.url(&format!("/idempotency/expire?id={id}"))).answer().await.text();
    let seen = question.split("name=\"seen\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    let fields = |host: &str, action: &str| {
        let action = format!("http://{}/idempotency/{action}", rig.server.address);
        let fields = [("action", &*action), ("id", &id), ("seen", seen), ("principal", "alice")];
        let query = serde_urlencoded::to_string(fields).unwrap();
        format!("http://{host}:{}/evil?{query}", rig.server.address.port())
    };
    for action in ["expire", "erase"] {
        browser.goto(&fields("localhost", action)).await.unwrap();
        browser.sees("Win a prize").await;
        browser.click("button").await;
        browser.sees("not sent from a page of the inspector").await;
        assert!(ordered(&rig, "a").await.is_replay(), "{action}");
    }
    // The same form on a page of the same site would do it: the test above tests what it says.
    browser.goto(&fields("127.0.0.1", "expire")).await.unwrap();
    browser.sees("Win a prize").await;
    browser.click("button").await;
    browser.sees("Expired: the next request").await;
    assert!(!ordered(&rig, "a").await.is_replay());
}

/// The example, behind its login, as the pictures of the README show it. `IT_PICTURES=1` takes them anew, over two
/// minutes, so that there is something to see in the plots.
#[actix_web::test]
async fn the_example_shows_operators_what_the_readme_shows() {
    let Some(browser) = Browser::start().await else { return };
    let takes_pictures = env::var("IT_PICTURES").is_ok();
    browser.set_window_size(1180, 1180).await.unwrap();
    let db = Db::empty().await;
    let example = Example::start("inspector", &db.url, &[]);
    let post = |key: String, body: &str| {
        let post = client().post(example.url("/orders")).key(&key).body(body.to_owned());
        async move { post.answer().await.status.as_u16() }
    };
    for round in 0..60 {
        post(format!("order-{}", round * 2 / 3), "tea").await;
        if round % 7 == 0 {
            post(format!("order-{}", round * 2 / 3), "coffee").await;
            post(format!("cart-{round}"), "fails").await;
        }
        if round % 20 == 19 {
            db.lapse(&format!("order-{}", round / 2)).await;
            post(format!("order-{}", round / 2), "tea").await;
        }
        if takes_pictures {
            sleep(Duration::from_millis(200 + 900 * (round % 5))).await;
        }
    }
    spawn(post("checkout-7f3a".into(), "slow"));
    spawn(post("checkout-81c0".into(), "slow"));
    eventually("they run", async || {
        db.is("(SELECT count(*) = 2 FROM idempotency_keys WHERE state = 'outstanding')").await
    })
    .await;
    db.lapse("order-3").await;
    let at = |page: &str| example.url(&format!("/idempotency/{page}")).replace("://", "://operator:secret@");
    let picture = async |name: &str| {
        let file = format!("{}/examples/inspector-{name}.png", env!("CARGO_MANIFEST_DIR"));
        let taken = browser.screenshot().await.unwrap();
        if takes_pictures {
            fs::write(file, taken).unwrap();
        }
    };
    browser.goto(&at("overview")).await.unwrap();
    browser.sees("Live: looks every 5 s.").await;
    for seen in ["fresh", "taken-over 3 of 3", "order-3", "lapsed", "checkout-7f3a", "checkout-81c0"] {
        browser.sees(seen).await;
    }
    picture("overview").await;
    browser.set_window_size(900, 560).await.unwrap();
    browser.follow("checkout-7f3a").await;
    browser.sees("somebody runs it").await;
    browser.follow("Force the release").await;
    browser.sees("a payment could be made twice").await;
    picture("force-release").await;
}
