//! The published specification of a policy (IETF draft -07, section 2.5.2).

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use actix_web::{
    HttpRequest, HttpResponse, Resource,
    http::header::{self, Accept, Header},
    web,
};
use html_escape::encode_text;
use serde::Serialize;

use crate::{
    keep::Keep,
    policy::{OnCompleted, OnFailure, OnOutstanding, Part, Policy},
    selection::Fields,
    source::KeySource,
};

/// What a client has to know; each is a sentence or a value.
#[derive(Serialize)]
struct Document {
    header: &'static str,
    required: bool,
    methods: Vec<String>,
    key_sources: Vec<String>,
    key_format: Vec<String>,
    scope: Vec<String>,
    compared: String,
    expiry_seconds: Option<u64>,
    kept: String,
    while_outstanding: String,
    after_completion: &'static str,
    after_failure: &'static str,
    request_limit_bytes: Option<usize>,
    stored_answer_limit_bytes: usize,
    replay_marker: String,
    notes: Vec<String>,
}

pub(crate) fn resource(policy: &Policy, path: &str) -> Resource {
    let document = Document::of(policy);
    let html: Arc<str> = document.html().into();
    let json = serde_json::to_value(&document).unwrap_or_default();
    web::resource(path).route(web::get().to(move |request: HttpRequest| {
        let (html, json) = (Arc::clone(&html), json.clone());
        async move {
            if wants_json(&request) {
                HttpResponse::Ok().json(json)
            } else {
                HttpResponse::Ok().content_type("text/html; charset=utf-8").body(html.to_string())
            }
        }
    }))
}

fn wants_json(request: &HttpRequest) -> bool {
    Accept::parse(request).is_ok_and(|accept| {
        let preferred: mime::Mime = accept.preference();
        preferred.subtype() == mime::JSON
    }) && request.headers().contains_key(header::ACCEPT)
}

impl Document {
    fn of(policy: &Policy) -> Self {
        let text = |part, default: &str| policy.descriptions.get(&part).cloned().unwrap_or_else(|| default.to_owned());
        let mut key_format = vec![
            "1 to 255 visible ASCII characters without \", \\, comma and semicolon, bare or as a quoted string"
                .to_owned(),
        ];
        key_format.extend(policy.key_rules.iter().map(|rule| rule.text.clone()));
        let mut scope = vec![match &policy.resource {
            Some(name) => format!("the resource {name}"),
            None => "the resource: method and route".to_owned(),
        }];
        scope.push(match policy.principal {
            Some(_) => text(Part::Principal, "the caller, as the service knows it"),
            None => "the caller: the credential in Authorization".to_owned(),
        });
        if policy.tenant.is_some() {
            scope.push(text(Part::Tenant, "the tenant, as the service knows it"));
        }
        let mut notes = Vec::new();
        if policy.skip.is_some() {
            notes.push(text(Part::Skip, "Some requests are exempt."));
        }
        let limit = |most: NonZeroU32, what| {
            format!("Keys of a caller that {what}: at most {most}; more are refused with 429.")
        };
        notes.extend(policy.quota.outstanding.map(|most| limit(most, "are outstanding at a time")));
        notes.extend(policy.quota.live.map(|most| limit(most, "have not expired")));
        notes.extend(policy.may_replay.iter().map(|may| may.text.clone()));
        Self {
            header: "Idempotency-Key",
            required: policy.key_required,
            methods: policy.methods.iter().map(ToString::to_string).collect(),
            key_sources: policy.keys.iter().map(|source| source.name()).collect(),
            key_format,
            scope,
            compared: compared(policy),
            expiry_seconds: policy.retention.map(|retention| retention.as_secs()),
            kept: match &policy.keep {
                Keep::Success => "answers below 400".to_owned(),
                Keep::Draft => "answers below 400, and errors that the same request gets again".to_owned(),
                Keep::DraftWithValidation => {
                    "answers below 400, and errors that the same request gets again, rejections included".to_owned()
                }
                Keep::Everything => "every answer".to_owned(),
                Keep::When(_) => text(Part::Keep, "answers that the service chooses by their status"),
            },
            while_outstanding: match policy.on_outstanding {
                OnOutstanding::Conflict => "409 with Retry-After".to_owned(),
                OnOutstanding::Wait(wait) => {
                    format!("the answer, if it comes within {}; else 409 with Retry-After", in_words(wait))
                }
            },
            after_completion: match policy.on_completed {
                OnCompleted::Replay => "the stored answer",
                OnCompleted::Reject => "409",
                OnCompleted::RunAgain => "the request runs again",
            },
            after_failure: match policy.on_failure {
                OnFailure::Release => "the key may be used again at once",
                OnFailure::HoldLease => "409 for a while; then the key may be used again",
                OnFailure::HoldRetention => "409 until the key expires",
                OnFailure::Store => "the stored failure",
            },
            request_limit_bytes: (!policy.streams_body).then_some(policy.request_limit),
            stored_answer_limit_bytes: policy.response_limit,
            replay_marker: policy.replay_marker.to_string(),
            notes,
        }
    }

    fn html(&self) -> String {
        let expiry = match self.expiry_seconds {
            None => "never".to_owned(),
            Some(seconds) => format!("{} after completion", in_words(Duration::from_secs(seconds))),
        };
        let limit = self.request_limit_bytes.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
        let mut rows = vec![
            ("Header", self.header.to_owned()),
            ("Required", if self.required { "yes".into() } else { "no".into() }),
            ("Methods", self.methods.join(", ")),
            ("The key is taken from", self.key_sources.join(", else ")),
            ("Form of a key in the header", self.key_format.join(". ")),
            ("A key belongs to", self.scope.join("; ")),
            ("A retry is recognised by", self.compared.clone()),
            ("A key expires", expiry),
            ("What is kept", self.kept.clone()),
            ("While the first request runs", self.while_outstanding.clone()),
            ("After it was answered", self.after_completion.to_owned()),
            ("After it has failed", self.after_failure.to_owned()),
            ("Largest request body", limit),
            ("Largest answer that is kept with its body", format!("{} bytes", self.stored_answer_limit_bytes)),
            ("A replay is marked by", format!("{}: true", self.replay_marker)),
        ];
        rows.extend(self.notes.iter().map(|note| ("Note", note.clone())));
        let rows: String = rows
            .iter()
            .map(|(name, value)| format!("<tr><th scope=\"row\">{name}</th><td>{}</td></tr>\n", encode_text(value)))
            .collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Idempotency keys</title></head>\n\
             <body><h1>Idempotency keys</h1>\n<p>Send one key for one intent, and the same key on every retry of \
             it.</p>\n<table>\n{rows}</table></body></html>\n"
        )
    }
}

fn compared(policy: &Policy) -> String {
    let mut parts = vec!["method".to_owned(), "path".into(), "query".into()];
    parts.extend(policy.fingerprinted_headers.iter().map(|name| format!("the header {name}")));
    match &policy.compare {
        _ if policy.streams_body => {}
        Some(fields) => parts.push(fields.in_words()),
        None => {
            parts.push(Fields::all().in_words());
            let digests = policy.keys.iter().filter_map(KeySource::digested);
            parts.extend(digests.map(|fields| format!("where the key is a digest: {}", fields.in_words())));
        }
    }
    parts.join(", ")
}

fn in_words(duration: Duration) -> String {
    let (number, unit) = match duration.as_secs() {
        0 => return format!("{} ms", duration.as_millis()),
        seconds if seconds % 86_400 == 0 => (seconds / 86_400, "day"),
        seconds if seconds % 3600 == 0 => (seconds / 3600, "hour"),
        seconds => (seconds, "second"),
    };
    format!("{number} {unit}{}", if number == 1 { "" } else { "s" })
}
