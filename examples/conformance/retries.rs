//! The same request again: afterwards, with another body, at the same time, after its client has gone, after it has
//! failed.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use actix_web::rt::time::sleep;
use futures_util::future::try_join_all;
use reqwest::{StatusCode, header::HeaderValue};

use crate::{
    service::{Answer, Ground, Service, answer, with},
    table::{
        Finding,
        Source::{Draft, Practice},
        Table, fail, judge, not_applicable, pass,
    },
};

const CONCURRENT: usize = 20;

const NOT_TELLING: &str = "every key gets the same bytes, which do not tell a replay from a second run";

pub async fn replayed(service: &Service, ground: &Ground, table: &mut Table) {
    table.row(Draft("2.6"), "a first request is processed", Ok(pass(ground.first.status.to_string())));
    let again = answer(service.operation(Some(&ground.key))).await;
    let (replayed, marked) = match &again {
        Ok(again) => (Ok(told(ground, &ground.first, again)), Ok(judge(again.is_marked(), "Idempotency-Replayed"))),
        Err(error) => (Ok(fail(error.to_string())), Ok(not_applicable("no answer"))),
    };
    table.row(Draft("2.6"), "a retry gets the first answer, byte for byte", replayed);
    table.row(Practice, "a replay is marked", marked);
}

fn told(ground: &Ground, first: &Answer, again: &Answer) -> Finding {
    match ground.shows_replay(first, again) {
        Some(true) => pass(format!("{}, {} bytes", again.status, again.body.len())),
        Some(false) if first.status == again.status => fail(format!("{}, another answer", again.status)),
        Some(false) => fail(format!("{} after {}", again.status, first.status)),
        None => not_applicable(NOT_TELLING),
    }
}

/// The refusal, if it is one.
pub async fn reused(service: &Service, ground: &Ground, table: &mut Table) -> Option<Answer> {
    const REFUSED: &str = "the same key with another body is refused with 422";
    const KEPT: &str = "which leaves the first answer as it was";
    let Some(body) = &service.options.other_body else {
        table.row(Draft("2.7"), REFUSED, Ok(not_applicable("--other-body is empty")));
        table.row(Draft("2.6"), KEPT, Ok(not_applicable("--other-body is empty")));
        return None;
    };
    let reused = answer(service.operation(Some(&ground.key)).body(body.clone())).await;
    let refusal = reused.as_ref().is_ok_and(|reused| reused.status == 422);
    table.row(
        Draft("2.7"),
        REFUSED,
        reused
            .as_ref()
            .map_or_else(|error| Ok(fail(error.to_string())), |reused| Ok(judge(refusal, reused.status.to_string()))),
    );
    let again = answer(service.operation(Some(&ground.key))).await;
    table.row(Draft("2.6"), KEPT, again.map(|again| told(ground, &ground.first, &again)));
    reused.ok().filter(|_| refusal)
}

/// One of the refusals, if there are any.
pub async fn concurrent(service: &Service, ground: &Ground, table: &mut Table) -> Option<Answer> {
    let key = service.key();
    let request = || with(service.operation(Some(&key)), service.options.slow.as_ref());
    let all = try_join_all((0..CONCURRENT).map(|_| answer(request()))).await;
    let after = answer(service.operation(Some(&key))).await;
    let (finding, conflict) = match all {
        Err(error) => (Err(error), None),
        Ok(all) => {
            let finding = after.map(|after| one_answer(ground, &all, &after));
            (finding, all.into_iter().find(|answer| answer.status == 409))
        }
    };
    let requirement = format!("of {CONCURRENT} at the same time one runs, the others get 409 or its answer");
    table.row(Draft("2.6"), requirement, finding);
    let retry_after = match &conflict {
        None => not_applicable("no 409"),
        Some(conflict) => match conflict.headers.get("retry-after") {
            Some(when) => pass(String::from_utf8_lossy(when.as_bytes())),
            None => fail("no Retry-After"),
        },
    };
    table.row(Practice, "the 409 says when to retry", Ok(retry_after));
    conflict
}

fn one_answer(ground: &Ground, all: &[Answer], after: &Answer) -> Finding {
    let mut counts = BTreeMap::<StatusCode, usize>::new();
    all.iter().for_each(|answer| *counts.entry(answer.status).or_default() += 1);
    let mut seen = counts.iter().map(|(status, n)| format!("{n} × {}", status.as_u16())).collect::<Vec<_>>().join(", ");
    let Some(first) = all.iter().find(|answer| answer.is_success()) else {
        return fail(seen);
    };
    // A service may refuse for want of room; everything else is the one answer.
    let strays = all.iter().filter(|answer| !answer.is_success() && ![409, 429, 503].contains(&answer.status.as_u16()));
    let others = all.iter().filter(|answer| answer.is_success() && !first.is_told_by(answer)).count();
    if others > 0 {
        seen += &format!(", of which {others} with another answer");
    }
    if others > 0 || strays.count() > 0 {
        return fail(seen);
    }
    match ground.shows_replay(first, after) {
        Some(true) => pass(seen),
        Some(false) => fail(seen + ", and another answer afterwards"),
        None => not_applicable(NOT_TELLING),
    }
}

pub async fn reset(service: &Service, ground: &Ground, table: &mut Table) {
    let key = service.key();
    let finding = match service.reset(&key).await {
        Ok(()) => settled(service, ground, &key).await,
        Err(error) => Ok(fail(error.to_string())),
    };
    table.row(Practice, "whoever loses the connection gets one answer by retrying", finding);
}

/// Retries as a client does, until there is an answer.
async fn settled(service: &Service, ground: &Ground, key: &HeaderValue) -> reqwest::Result<Finding> {
    let began = Instant::now();
    loop {
        let retry = answer(service.operation(Some(key))).await?;
        if retry.is_success() {
            let again = answer(service.operation(Some(key))).await?;
            return Ok(told(ground, &retry, &again));
        }
        if ![409, 503].contains(&retry.status.as_u16()) || began.elapsed() > service.options.patience {
            return Ok(fail(format!("{} after {} s", retry.status, began.elapsed().as_secs())));
        }
        sleep(Duration::from_millis(250)).await;
    }
}

pub async fn failed(service: &Service, table: &mut Table) {
    let finding = match &service.options.fail {
        None => Ok(not_applicable("--fail is empty")),
        Some(_) => after_failure(service).await,
    };
    table.row(Draft("2.6"), "a retry after a failure runs, or repeats it; then that stays", finding);
}

async fn after_failure(service: &Service) -> reqwest::Result<Finding> {
    let key = service.key();
    let failed = answer(with(service.operation(Some(&key)), service.options.fail.as_ref())).await?;
    if failed.is_success() {
        return Ok(not_applicable("the header of --fail makes nothing fail"));
    }
    let retry = answer(service.operation(Some(&key))).await?;
    let again = answer(service.operation(Some(&key))).await?;
    let seen = format!("{}, {}, {}", failed.status.as_u16(), retry.status.as_u16(), again.status.as_u16());
    Ok(judge((retry.is_success() || failed.is_told_by(&retry)) && retry.is_told_by(&again), seen))
}
