//! Keys that are missing, that cannot be read, that are somebody else's, or where they mean nothing.

use reqwest::{Method, header::HeaderValue};

use crate::{
    service::{Answer, Ground, KEY, Service, answer, with},
    table::{
        Finding,
        Source::{Draft, Practice},
        Table, fail, judge, not_applicable, pass,
    },
};

/// A quoted string that never ends.
const UNBALANCED: HeaderValue = HeaderValue::from_static("\"unbalanced");

/// The refusal, if it is one.
pub async fn missing(service: &Service, table: &mut Table) -> Option<Answer> {
    let missing = answer(service.operation(None)).await;
    let finding = match &missing {
        Err(error) => fail(error.to_string()),
        Ok(missing) if missing.is_success() && !service.options.required => {
            not_applicable(format!("{}: keys are optional, or say --required", missing.status))
        }
        Ok(missing) => judge(missing.status == 400, missing.status.to_string()),
    };
    table.row(Draft("2.7"), "a missing key is refused with 400 where one is required", Ok(finding));
    missing.ok().filter(|missing| missing.status == 400)
}

/// One of the refusals, if there are any.
pub async fn malformed(service: &Service, table: &mut Table) -> Option<Answer> {
    let visible = |key: String| HeaderValue::try_from(key).expect("visible ASCII characters");
    let keys = [
        (Draft("5"), "an empty key", vec![HeaderValue::from_static("")]),
        (Draft("2.1"), "a quoted string without an end", vec![UNBALANCED]),
        (Draft("2.1"), "a key that is not ASCII", HeaderValue::from_bytes("ключ".as_bytes()).into_iter().collect()),
        (Practice, "a key of 2,000 characters", vec![visible(format!("\"{}\"", "a".repeat(2000)))]),
        (Practice, "a request with two keys", vec![service.key(), service.key()]),
    ];
    let mut refusal = None;
    for (source, what, keys) in keys {
        let request = keys.iter().fold(service.operation(None), |request, key| request.header(KEY, key));
        let answer = answer(request).await;
        table.row(
            source,
            format!("{what} is refused with 400"),
            answer.as_ref().map_or_else(
                |error| Ok(fail(error.to_string())),
                |answer| Ok(judge(answer.status == 400, answer.status.to_string())),
            ),
        );
        refusal = refusal.or(answer.ok().filter(|answer| answer.status == 400));
    }
    refusal
}

pub async fn other_user(service: &Service, ground: &Ground, table: &mut Table) {
    let finding = match &service.options.other_user {
        None => Ok(not_applicable("give --other-user")),
        Some(_) => belongs_to_its_user(service, ground).await,
    };
    table.row(Draft("5"), "the same key of another user is another key", finding);
}

async fn belongs_to_its_user(service: &Service, ground: &Ground) -> reqwest::Result<Finding> {
    let other = service.options.other_user.as_ref();
    let same_body = answer(with(service.operation(Some(&ground.key)), other)).await?;
    if !same_body.is_success() {
        return Ok(fail(format!("{}: it tells that the key is in use", same_body.status)));
    }
    Ok(match ground.shows_replay(&ground.first, &same_body) {
        Some(true) => fail("somebody else's answer"),
        Some(false) => pass(same_body.status.to_string()),
        None => not_applicable("every key gets the same bytes: whose answer it is cannot be seen"),
    })
}

pub async fn safe_methods(service: &Service, ground: &Ground, table: &mut Table) {
    for method in [Method::GET, Method::HEAD] {
        let finding = unaffected(service, ground, &method).await;
        table.row(Draft("1"), format!("{method} is unaffected by keys, readable or not"), finding);
    }
}

async fn unaffected(service: &Service, ground: &Ground, method: &Method) -> reqwest::Result<Finding> {
    let without = answer(service.request(method.clone(), None)).await?;
    if [404, 405, 501].contains(&without.status.as_u16()) {
        return Ok(not_applicable(format!("{}: there is no {method} here", without.status)));
    }
    for key in [&ground.key, &UNBALANCED] {
        let with = answer(service.request(method.clone(), Some(key))).await?;
        if with.status != without.status || with.is_marked() {
            return Ok(fail(format!("{} without a key, {} with one", without.status, with.status)));
        }
    }
    Ok(pass(without.status.to_string()))
}
