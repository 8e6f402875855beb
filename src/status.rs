//! What has become of a key, for the client that sent it.

use std::sync::Arc;

use actix_web::{
    HttpRequest, HttpResponse, ResponseError, Route,
    http::header,
    web::{self, Query},
};
use serde::{Deserialize, Serialize};

use crate::{
    coding,
    decision::is_newer,
    engine::Engine,
    error::Error,
    idempotency::Idempotency,
    key::IdempotencyKey,
    policy::{OnCompleted, Policy},
    postgres::row::Row,
    refusal::{Code, Refusal},
    scope::{KeyId, Scope},
    source::path_parameter,
    telemetry,
    told::Stored,
};

/// Of which resource the keys are.
struct Status {
    idempotency: Idempotency,
    method: String,
    pattern: String,
}

#[derive(Deserialize)]
struct Wish {
    /// `?answer=true`: the stored answer itself.
    #[serde(default)]
    answer: bool,
}

#[derive(Serialize)]
struct Told<'a> {
    state: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(&'a str, String)>,
}

pub(crate) fn route(idempotency: Idempotency, method: &str, pattern: &str) -> Route {
    let status = Arc::new(Status { idempotency, method: method.to_ascii_uppercase(), pattern: pattern.to_owned() });
    web::get().to(move |request: HttpRequest, wish: Query<Wish>| {
        let status = Arc::clone(&status);
        async move { status.answer(&request, wish.answer).await }
    })
}

impl Status {
    async fn answer(&self, request: &HttpRequest, wants_answer: bool) -> HttpResponse {
        let (engine, policy) = match self.idempotency.resolve(request) {
            Ok(found) => found,
            Err(code) => return Refusal::new(code).error_response(),
        };
        match self.find(request, &engine, &policy, wants_answer).await {
            Ok(response) => response,
            Err(refusal) => refusal.under(&policy).error_response(),
        }
    }

    async fn find(
        &self,
        request: &HttpRequest,
        engine: &Arc<Engine>,
        policy: &Policy,
        wants_answer: bool,
    ) -> Result<HttpResponse, Refusal> {
        let key = IdempotencyKey::try_from(path_parameter(request, "key").unwrap_or_default())?;
        let scope = Scope::elsewhere(request, policy, &self.method, &self.pattern)?;
        for source in &policy.keys {
            let id = scope.id(&source.tag(), &key);
            match fate(engine, policy, &id).await.map_err(|error| failed(&error))? {
                Fate::Outstanding => return Ok(outstanding(policy)),
                Fate::Held => return Ok(held()),
                Fate::Newer => return Err(Code::NewerVersion.into()),
                Fate::Completed(row) => return completed(request, policy, *row, wants_answer),
                Fate::Nothing => {}
            }
        }
        Err(Code::KeyUnknown.into())
    }
}

/// What has become of a key.
enum Fate {
    Outstanding,
    /// Nobody runs it, and nobody may yet.
    Held,
    Completed(Box<Row>),
    /// A newer version of this crate has written it.
    Newer,
    /// It is unknown, has expired, or was released: nothing was done.
    Nothing,
}

impl Fate {
    fn of(row: Row) -> Self {
        match row.state.as_str() {
            _ if row.expired => Self::Nothing,
            _ if is_newer(&row) => Self::Newer,
            _ if row.is_held() => Self::Held,
            "outstanding" => Self::Outstanding,
            "completed" => Self::Completed(Box::new(row)),
            _ => Self::Nothing,
        }
    }
}

/// Without a row somebody may run it all the same under an atomic policy. Where nobody does any more, the row that they
/// have written meanwhile is there.
async fn fate(engine: &Engine, policy: &Policy, id: &KeyId) -> Result<Fate, Error> {
    let before = engine.look(id, policy).await?.map_or(Fate::Nothing, Fate::of);
    match before {
        Fate::Nothing if policy.is_atomic => {
            if engine.is_locked(id, policy).await? {
                return Ok(Fate::Outstanding);
            }
            Ok(engine.look(id, policy).await?.map_or(Fate::Nothing, Fate::of))
        }
        known => Ok(known),
    }
}

fn outstanding(policy: &Policy) -> HttpResponse {
    HttpResponse::Accepted()
        .insert_header((header::RETRY_AFTER, policy.retry_after.as_secs().max(1).to_string()))
        .insert_header((header::CACHE_CONTROL, "no-store"))
        .json(Told { state: "outstanding", status: None, headers: Vec::new() })
}

fn held() -> HttpResponse {
    HttpResponse::Accepted().insert_header((header::CACHE_CONTROL, "no-store")).json(Told {
        state: "held",
        status: None,
        headers: Vec::new(),
    })
}

fn completed(request: &HttpRequest, policy: &Policy, row: Row, wants_answer: bool) -> Result<HttpResponse, Refusal> {
    if policy.may_replay.as_ref().is_some_and(|may| !(may.closure)(request)) {
        return Err(Code::ReplayForbidden.into());
    }
    let Stored { snapshot, .. } = Stored::of(row).map_err(|error| failed(&error))?;
    if wants_answer && policy.on_completed == OnCompleted::Reject {
        return Err(Code::AlreadyCompleted.into());
    }
    if wants_answer {
        let mut response = coding::fit(snapshot, request, policy)?.replay(policy);
        // As stored it was the answer to a POST, which nobody keeps by the address; this one is to a GET.
        response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
        return Ok(response);
    }
    let headers = snapshot.headers();
    let headers = headers.map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    let told = Told { state: "completed", status: Some(snapshot.status().as_u16()), headers: headers.collect() };
    Ok(HttpResponse::Ok().insert_header((header::CACHE_CONTROL, "no-store")).json(told))
}

fn failed(error: &Error) -> Refusal {
    telemetry::store_failed("the status of a key could not be read", error);
    Code::StoreUnavailable.into()
}
