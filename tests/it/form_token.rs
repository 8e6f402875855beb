//! Form tokens: one form, sent however often, runs once (O01, O02, O04, O06, and Z for tokens).

use std::{
    panic::{UnwindSafe, catch_unwind},
    time::Duration,
};

use actix_idempotency::{
    Code, FormToken, FormTokens, Idempotency, KeySource, OnCompleted, OnOutstanding, Policy, Quota, Wording,
};
use actix_web::{rt, test::TestRequest, web};
use futures_util::future::join_all;
use reqwest::Method;

use crate::support::{
    PATIENCE,
    app::created,
    client::RequestExt,
    db::Db,
    forms::{FormExt, Forms, assert_first, assert_refused, policies, rig, rig_on, routes, secret, tokens},
    log,
    rig::Rig,
};

#[actix_web::test]
async fn a_form_that_is_sent_twice_runs_once_and_gets_the_first_answer_twice() {
    for policy in policies() {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        let first = rig.submit(&token, "a").answer().await;
        assert_first(&first);
        first.assert_replayed_by(&rig.submit(&token, "a").answer().await);
        assert_eq!(rig.db.all_effects().await, 1);
        // Of the token only its id is stored, apart from all other keys.
        let row =
            "SELECT domain || ' ' || principal || ' ' || resource || ' ' || length(key) AS value FROM idempotency_keys";
        assert_eq!(rig.db.text(row).await.unwrap(), "token alice order 32");
        assert!(
            !rig.db.is(&format!("EXISTS (SELECT FROM idempotency_keys AS k WHERE k::text LIKE '%{token}%')")).await
        );
    }
}

#[actix_web::test]
async fn issuing_writes_nothing_and_every_token_is_another() {
    let rig = rig(Policy::new()).await;
    let before = rig.db.text("SELECT pg_current_wal_insert_lsn()::text AS value").await;
    let all = join_all((0..100).map(|_| rig.token("order"))).await;
    assert_eq!(rig.db.keys().await, 0, "{before:?}");
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), 100);
    // However many were issued since.
    assert_first(&rig.submit(&all[0], "a").answer().await);
    let answer = rig.get("/tokens/order").header("x-user", "alice").answer().await;
    assert_eq!((answer.header("cache-control"), answer.json()["expires_in"].as_u64()), (Some("no-store"), Some(600)));
}

#[actix_web::test]
async fn a_page_has_the_token_in_a_hidden_input() {
    let rig = rig(Policy::new()).await;
    let page = rig.get("/order/page").header("x-user", "alice").answer().await.text();
    let token = page
        .strip_prefix(r#"<input type="hidden" name="form_token" value=""#)
        .and_then(|rest| rest.strip_suffix(r#"" autocomplete="off">"#))
        .unwrap_or_else(|| panic!("{page}"));
    assert_first(&rig.submit(token, "a").answer().await);
    // Nobody to issue one to.
    assert_refused(&rig.get("/order/page").answer().await, 401, "principal-missing");
    assert_refused(&rig.get("/tokens/order").answer().await, 401, "principal-missing");
}

#[actix_web::test]
async fn an_issuer_without_tokens_in_the_app_data_is_misconfigured() {
    let rig = Rig::builder()
        .serve(|config, _, _| {
            config.route("/", web::get().to(async |_: actix_idempotency::TokenIssuer| created(1)));
        })
        .await;
    assert_refused(&rig.get("/").answer().await, 500, "misconfigured");
}

#[actix_web::test]
async fn a_handler_can_take_the_token_that_it_was_sent() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            let told = async |token: FormToken| token.hidden_input();
            let policy = Policy::new().form_token(&tokens(&[1]), "order");
            let protected = web::resource("/order").wrap(idempotency.with(policy)).route(web::post().to(told));
            config
                .route("/tokens/order", tokens(&[1]).route("order"))
                .service(protected)
                .route("/bare", web::post().to(told));
        })
        .await;
    let token = rig.token("order").await;
    assert!(rig.submit(&token, "a").answer().await.text().contains(&format!("value=\"{token}\"")));
    assert_refused(&rig.submit_to("/bare", &token, "a").answer().await, 400, "token-missing");
}

// --- O01 --------------------------------------------------------------------------------------------------------------

/// O01
#[actix_web::test]
async fn of_twenty_submits_of_one_token_one_runs() {
    for policy in policies() {
        let wait = policy.clone().on_outstanding(OnOutstanding::Wait(PATIENCE));
        let rig = rig(wait.clone()).await;
        let twin = rig.twin_serving(wait.clone(), routes(wait, tokens(&[1])));
        let (token, other) = (rig.token("order").await, twin.token("order").await);
        let submits = (0..20).map(|n| match n % 2 {
            0 => rig.submit(&token, "a").answer(),
            _ => twin.submit(&token, "a").answer(),
        });
        let answers = join_all(submits).await;
        assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
        let first = answers.iter().find(|answer| !answer.is_replay()).unwrap();
        answers.iter().filter(|answer| answer.is_replay()).for_each(|replay| first.assert_replayed_by(replay));
        assert_eq!(rig.db.effects("a").await, 1);
        // Those that do not wait are told to.
        let impatient = rig.twin_serving(policy.clone(), routes(policy, tokens(&[1])));
        let answers = join_all((0..20).map(|_| impatient.submit(&other, "b").answer())).await;
        assert!(answers.iter().all(|answer| answer.status == 201 || answer.code() == "outstanding"), "{answers:?}");
        assert_eq!(rig.db.effects("b").await, 1);
    }
}

// --- O02 --------------------------------------------------------------------------------------------------------------

/// O02
#[actix_web::test]
async fn a_rejected_form_gives_its_token_back_and_the_corrected_one_goes_through() {
    for policy in policies() {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        for _ in 0..2 {
            assert_eq!(rig.submit(&token, "").answer().await.text(), "Which one?");
        }
        let first = rig.submit(&token, "a").answer().await;
        assert_first(&first);
        first.assert_replayed_by(&rig.submit(&token, "a").answer().await);
        assert_refused(&rig.submit(&token, "b").answer().await, 409, "token-used");
        assert_refused(&rig.submit(&token, "").answer().await, 409, "token-used");
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

#[actix_web::test]
async fn a_form_that_an_extractor_rejects_gives_its_token_back() {
    for policy in policies() {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        let nameless = rig.post("/order").header("x-user", "alice").header("form-token", &token).form(&[("qty", "1")]);
        assert_eq!(nameless.answer().await.status, 400);
        assert_first(&rig.submit(&token, "a").answer().await);
    }
}

#[actix_web::test]
async fn a_handler_that_fails_gives_the_token_back_for_the_same_form() {
    for (policy, corrected) in policies().into_iter().zip([false, true]) {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        assert_eq!(rig.submit(&token, "a").header("x-fail", "500").answer().await.status, 500);
        assert_first(&rig.submit(&token, "a").answer().await);
        assert_eq!(rig.db.all_effects().await, 1);
        // With other contents: what a failure has done is unknown, unless all of it was rolled back.
        let token = rig.token("order").await;
        assert_eq!(rig.submit(&token, "b").header("x-fail", "500").answer().await.status, 500);
        let other = rig.submit(&token, "c").answer().await;
        if corrected {
            assert_first(&other);
        } else {
            assert_refused(&other, 422, "key-reused");
            assert!(other.text().contains("The form was sent"), "{other:?}");
        }
    }
}

#[actix_web::test]
async fn who_waited_for_a_form_that_was_rejected_goes_through() {
    for policy in policies() {
        let rig = rig(policy.on_outstanding(OnOutstanding::Wait(PATIENCE))).await;
        let token = rig.token("order").await;
        let held = rt::spawn(rig.submit(&token, "a").header("x-hold", "1").header("x-fail", "422").answer());
        rig.gate.entered(1).await;
        let second = rt::spawn(rig.submit(&token, "a").answer());
        rig.gate.open(1);
        assert_eq!(held.await.unwrap().status, 422);
        assert_first(&second.await.unwrap());
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

// --- O04 --------------------------------------------------------------------------------------------------------------

/// O04
#[actix_web::test]
async fn a_second_click_waits_for_the_first_answer_or_is_told_that_it_is_on_its_way() {
    for policy in policies() {
        let rig = rig(policy.clone()).await;
        let token = rig.token("order").await;
        let held = rt::spawn(rig.submit(&token, "a").header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        let told = rig.submit(&token, "a").answer().await;
        assert_refused(&told, 409, "outstanding");
        assert_eq!(told.retry_after(), Some(1));

        let patient = policy.on_outstanding(OnOutstanding::Wait(PATIENCE));
        let twin = rig.twin_serving(patient.clone(), routes(patient, tokens(&[1])));
        let waits = rt::spawn(twin.submit(&token, "a").answer());
        rig.gate.open(1);
        let first = held.await.unwrap();
        assert_first(&first);
        first.assert_replayed_by(&waits.await.unwrap());
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

/// O04
#[actix_web::test]
async fn a_policy_may_refuse_the_second_click_with_a_page_of_its_own() {
    for policy in policies() {
        let page = Wording::new().body("text/html; charset=utf-8", "<p>We have your order already.</p>");
        let rejects = policy.clone().on_completed(OnCompleted::Reject);
        let rig = rig(rejects.clone().wording(Code::TokenUsed, page)).await;
        let token = rig.token("order").await;
        assert_first(&rig.submit(&token, "a").answer().await);
        for sku in ["a", "b"] {
            let second = rig.submit(&token, sku).answer().await;
            assert_eq!((second.status.as_u16(), second.text().as_str()), (409, "<p>We have your order already.</p>"));
        }
        let plain = rig.twin_serving(rejects.clone(), routes(rejects, tokens(&[1])));
        assert_refused(&plain.submit(&token, "a").answer().await, 409, "token-used");
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

// --- O06, Z -----------------------------------------------------------------------------------------------------------

/// O06
#[actix_web::test]
async fn tokens_of_two_tabs_are_independent() {
    let rig = rig(Policy::new()).await;
    let (one, two) = (rig.token("order").await, rig.token("order").await);
    let (first, second) = (rig.submit(&one, "a").answer().await, rig.submit(&two, "a").answer().await);
    assert_first(&first);
    assert_first(&second);
    first.assert_replayed_by(&rig.submit(&one, "a").answer().await);
    second.assert_replayed_by(&rig.submit(&two, "a").answer().await);
    assert_eq!(rig.db.all_effects().await, 2);
}

/// O06, Z01
#[actix_web::test]
async fn tokens_of_another_user_or_form_are_refused_and_not_consumed_used_or_not() {
    for policy in policies() {
        let rig = rig(policy).await;
        let token = rig.token("order").await;
        for used in [false, true] {
            let other_form = rig.submit_to("/other", &token, "a").answer().await;
            assert_refused(&other_form, 403, "token-of-other-action");
            let stolen = rig.post("/order").header("x-user", "bob").form(&[("form_token", &*token), ("sku", "a")]);
            let stolen = stolen.answer().await;
            assert_refused(&stolen, 403, "token-of-other-principal");
            let nobody = rig.post("/order").form(&[("form_token", &*token), ("sku", "a")]).answer().await;
            assert_refused(&nobody, 401, "principal-missing");
            assert_eq!(rig.db.keys().await, i64::from(used));
            if !used {
                assert_first(&rig.submit(&token, "a").answer().await);
            }
        }
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

/// Z05
#[actix_web::test]
async fn a_token_is_for_one_tenant_where_there_are_tenants() {
    let of = |request: &actix_web::HttpRequest| Some(request.headers().get("x-tenant")?.to_str().unwrap().to_owned());
    let rig = rig_on(Db::new().await, Policy::new().tenant(of), tokens(&[1]).tenant(of)).await;
    let show = rig.get("/tokens/order").header("x-user", "alice").header("x-tenant", "1").answer().await.json();
    let token = show["form_token"].as_str().unwrap();
    let refused = rig.submit(token, "a").header("x-tenant", "2").answer().await;
    assert_refused(&refused, 403, "token-of-other-principal");
    assert_first(&rig.submit(token, "a").header("x-tenant", "1").answer().await);
}

#[actix_web::test]
async fn one_token_is_one_key_wherever_its_action_is_served() {
    let routes = |config: &mut web::ServiceConfig, idempotency: &Idempotency, _: &actix_idempotency::PgPool| {
        for path in ["/a", "/b"] {
            let policy = Policy::new().form_token(&tokens(&[1]), "order").resource(path);
            let resource = web::resource(path).wrap(idempotency.with(policy));
            config.service(resource.route(web::post().to(async || created(1))));
        }
        config.route("/tokens/order", tokens(&[1]).route("order"));
    };
    let rig = Rig::builder().serve(routes).await;
    let token = rig.token("order").await;
    assert_first(&rig.submit_to("/a", &token, "x").answer().await);
    assert_refused(&rig.submit_to("/b", &token, "x").answer().await, 409, "token-used");
}

// --- what does not consume --------------------------------------------------------------------------------------------

#[actix_web::test]
async fn safe_methods_never_use_a_token_up() {
    let rig = rig(Policy::new()).await;
    let token = rig.token("order").await;
    for method in [Method::GET, Method::HEAD, Method::OPTIONS] {
        let prefetch = rig.request(method, &format!("/order?form_token={token}"));
        let _ = prefetch
            .header("x-user", "alice")
            .header("form-token", &token)
            .header("purpose", "prefetch")
            .answer()
            .await;
    }
    assert_eq!(rig.db.keys().await, 0);
    assert_first(&rig.submit(&token, "a").answer().await);
}

#[actix_web::test]
async fn a_form_without_a_token_is_refused_and_told_so() {
    let rig = rig(Policy::new()).await;
    let bare = || rig.post("/order").header("x-user", "alice");
    for request in [bare().form(&[("sku", "a")]), bare(), bare().key("k").json(&1), rig.post("/stream").body("x")] {
        assert_refused(&request.answer().await, 400, "token-missing");
    }
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
}

#[actix_web::test]
async fn a_token_may_be_one_source_among_others() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            let tokens = tokens(&[1]);
            let sources = [KeySource::header(), KeySource::form_token(&tokens, "order")];
            let policy = Policy::new().keys(sources).require_key();
            config.route("/tokens/order", tokens.route("order")).service(
                web::resource("/order").wrap(idempotency.with(policy)).route(web::post().to(async || created(1))),
            );
        })
        .await;
    let token = rig.token("order").await;
    let (by_token, by_key) = (rig.submit(&token, "a").answer().await, rig.submit("", "a").key("k").answer().await);
    assert_first(&by_token);
    assert_first(&by_key);
    by_token.assert_replayed_by(&rig.submit(&token, "a").answer().await);
    by_key.assert_replayed_by(&rig.submit("", "a").key("k").answer().await);
    // The header is first, and its key belongs to whoever the policy says.
    assert_first(&rig.submit(&token, "a").key("l").answer().await);
    assert_refused(&rig.post("/order").header("x-user", "alice").answer().await, 400, "key-missing");
}

// --- keys -------------------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn keys_rotate_without_a_form_being_lost() {
    let rig = rig_on(Db::new().await, Policy::new(), tokens(&[1])).await;
    // Knows the new key, signs with the new key, has dropped the old one.
    let twin = |keys: &[u8]| rig.twin_serving(Policy::new(), routes(Policy::new(), tokens(keys)));
    let (knows, signs, dropped) = (twin(&[1, 2]), twin(&[2, 1]), twin(&[2]));
    let (old, new) = (rig.token("order").await, signs.token("order").await);
    let first = knows.submit(&old, "a").answer().await;
    assert_first(&first);
    first.assert_replayed_by(&signs.submit(&old, "a").answer().await);
    let second = knows.submit(&new, "b").answer().await;
    assert_first(&second);
    second.assert_replayed_by(&dropped.submit(&new, "b").answer().await);
    assert_refused(&dropped.submit(&old, "a").answer().await, 403, "token-unknown");
    assert_refused(&rig.submit(&new, "b").answer().await, 403, "token-unknown");
    assert_eq!(rig.db.all_effects().await, 2);
}

#[actix_web::test]
async fn tokens_without_a_principal_closure_belong_to_the_credential_and_anonymous_ones_to_anybody() {
    let credential = FormTokens::new([secret(1)]);
    let rig = rig_on(Db::new().await, Policy::new(), credential.clone()).await;
    assert_refused(&rig.get("/tokens/order").answer().await, 401, "principal-missing");
    let issued = rig.get("/tokens/order").user("alice").answer().await.json();
    let token = issued["form_token"].as_str().unwrap();
    assert_refused(&rig.submit(token, "a").user("bob").answer().await, 403, "token-of-other-principal");
    assert_first(&rig.submit(token, "a").user("alice").answer().await);

    let anybody = rig.twin_serving(Policy::new(), routes(Policy::new(), credential.anonymous()));
    let token = anybody.token("order").await;
    assert_first(&anybody.submit(&token, "a").answer().await);
}

#[actix_web::test]
async fn tokens_count_for_the_quota_of_their_principal() {
    let quota = Quota { live: std::num::NonZeroU32::new(2), ..Quota::default() };
    let rig = rig(Policy::new().quota(quota)).await;
    let mut used = Vec::new();
    for _ in 0..2 {
        used.push(rig.token("order").await);
        assert_first(&rig.submit(used.last().unwrap(), "a").answer().await);
    }
    assert_refused(&rig.submit(&rig.token("order").await, "a").answer().await, 429, "quota-exceeded");
    assert!(rig.submit(&used[0], "a").answer().await.is_replay());
}

// --- settings ---------------------------------------------------------------------------------------------------------

fn panics(build: impl FnOnce() + UnwindSafe) -> String {
    let panic = catch_unwind(build).expect_err("it should not build");
    panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into())).unwrap()
}

#[actix_web::test]
async fn settings_that_contradict_each_other_fail_when_they_are_made() {
    let db = Db::new().await;
    let idempotency = Idempotency::postgres(db.pool(1));
    let with = |policy: Policy| {
        let idempotency = idempotency.clone();
        panics(std::panic::AssertUnwindSafe(move || drop(idempotency.with(policy))))
    };
    let form = |policy: Policy, tokens: &FormTokens| policy.form_token(tokens, "order");
    let minute = Duration::from_secs(60);
    let short = with(form(Policy::new().retention(minute), &tokens(&[1])));
    assert!(short.contains("FormTokens::lifetime") && short.contains("Policy::retention"), "{short}");
    for fits in [Policy::new().retention(minute), Policy::new().retain_forever()] {
        let _ = idempotency.with(form(fits, &tokens(&[1]).lifetime(minute)));
    }
    for names in [Policy::new().principal(|_| None), Policy::new().tenant(|_| None)] {
        assert!(with(form(names, &FormTokens::new([secret(1)]))).contains("FormTokens::principal"));
    }
    let anybody = form(Policy::new().refuse_anonymous(), &tokens(&[1]).anonymous());
    assert!(with(anybody).contains("FormTokens::anonymous"));
    let _ = idempotency.with(form(Policy::new().refuse_anonymous(), &tokens(&[1])));
    assert!(panics(|| drop(FormTokens::new([]))).contains("at least one key"));
    assert!(panics(|| drop(tokens(&[1]).lifetime(Duration::from_millis(999)))).contains("FormTokens::lifetime"));
}

#[actix_web::test]
async fn neither_debug_nor_the_log_shows_a_token() {
    log::listen();
    let rig = rig(Policy::new()).await;
    let token = rig.token("order").await;
    let tokens = tokens(&[1]);
    let request = TestRequest::get().insert_header(("x-user", "alice")).to_http_request();
    let issued = tokens.issue(&request, "order").unwrap();
    for shown in
        [format!("{tokens:?}"), format!("{issued:?}"), format!("{:?}", KeySource::form_token(&tokens, "order"))]
    {
        assert!(!shown.contains(issued.as_str()) && !shown.contains('1'), "{shown}");
    }
    assert_first(&rig.submit(&token, "a").answer().await);
    assert_refused(&rig.submit(&token, "b").answer().await, 409, "token-used");
    assert_refused(&rig.submit(&format!("{token}\n\u{0}"), "a").answer().await, 400, "token-invalid");
    let key = rig.db.text("SELECT key AS value FROM idempotency_keys").await.unwrap();
    let said = log::all().iter().map(|line| format!("{line:?}")).collect::<String>();
    assert!(said.contains(&rig.db.id(&key).await), "the log should tell of the row");
    assert!(!said.contains(&token) && !said.contains(&key));
}
