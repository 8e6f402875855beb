//! An endpoint without this crate, right but for one flaw: what a proof must find out.
//!
//! `x-fail` makes an attempt fail, `x-slow-ms` makes it slow.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use actix_web::{
    App, Error, HttpRequest, HttpResponse,
    body::MessageBody,
    dev::{ServiceFactory, ServiceRequest, ServiceResponse},
    http::StatusCode,
    rt::{
        spawn,
        time::{sleep, timeout},
    },
    web::{self, Data},
};
use tokio::sync::watch;

use super::PATIENCE;

/// How long a key that is under way is said to be remembered.
pub const WINDOW: Duration = Duration::from_millis(200);
/// How long a piece of work takes.
const MOMENT: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// It looks at no key.
    Unprotected,
    /// It looks whether the key is known, and notes it when the work is done.
    CheckThenAct,
    /// Its work ends with its client's connection, and gives the key back.
    RunsAgainAfterReset,
    /// Its work ends with its client's connection, and keeps the key.
    LosesItsKey,
    /// It compares keys and not requests.
    ComparesKeysOnly,
    /// A failure is an answer like any other.
    KeepsFailures,
    /// The key of a slow request is free again for the second duplicate, until which it runs.
    ForgetsWhileItRuns,
    /// Duplicates are told the one answer, and the work is done twice.
    WorksTwice,
    /// Every answer is empty, and no replay marked.
    TellsNothing,
    /// Duplicates find out by a unique constraint, which is an error.
    FailsDuplicates,
    /// It never answers.
    Hangs,
    /// It never answers a duplicate of a running request.
    HangsForDuplicates,
}

pub struct Endpoint {
    flaw: Flaw,
    effects: AtomicI64,
    keys: Mutex<HashMap<String, Known>>,
    /// How often a slow key was asked for, and who waits for that.
    asked: watch::Sender<HashMap<String, u32>>,
}

#[derive(Clone)]
struct Known {
    request: String,
    /// `None` while it runs.
    answer: Option<(StatusCode, String)>,
}

impl Endpoint {
    pub fn new(flaw: Flaw) -> Data<Self> {
        Data::new(Self { flaw, effects: AtomicI64::new(0), keys: Mutex::default(), asked: watch::Sender::default() })
    }

    pub fn effects(&self) -> i64 {
        self.effects.load(Ordering::SeqCst)
    }

    async fn work(&self, request: &Wish) -> (StatusCode, String) {
        if self.flaw != Flaw::RunsAgainAfterReset {
            sleep(MOMENT).await;
        }
        if request.fails {
            return (StatusCode::INTERNAL_SERVER_ERROR, "failed".into());
        }
        let n = self.effects.fetch_add(1, Ordering::SeqCst);
        if self.flaw == Flaw::WorksTwice {
            self.effects.fetch_add(1, Ordering::SeqCst);
        }
        // What ends with its connection has done its work at once, and most of its time is left.
        sleep(if self.flaw == Flaw::RunsAgainAfterReset { 20 * MOMENT } else { MOMENT }).await;
        if self.flaw == Flaw::ForgetsWhileItRuns && request.is_slow() {
            let mut asked = self.asked.subscribe();
            let both = asked.wait_for(|asked| asked.get(&request.key).is_some_and(|times| *times >= 3));
            let _ = timeout(PATIENCE, both).await;
        }
        sleep(request.slow).await;
        (StatusCode::CREATED, if self.flaw == Flaw::TellsNothing { String::new() } else { n.to_string() })
    }

    fn note(&self, request: &Wish, answer: (StatusCode, String)) {
        let mut keys = self.keys.lock().unwrap();
        if answer.0.is_success() || self.flaw == Flaw::KeepsFailures {
            let known = Known { request: request.body.clone(), answer: Some(answer) };
            // What was told once stays.
            if keys.get(&request.key).is_none_or(|known| known.answer.is_none() || self.flaw == Flaw::CheckThenAct) {
                keys.insert(request.key.clone(), known);
            }
        } else {
            keys.remove(&request.key);
        }
    }
}

#[derive(Clone)]
struct Wish {
    key: String,
    body: String,
    slow: Duration,
    fails: bool,
}

impl Wish {
    fn is_slow(&self) -> bool {
        !self.slow.is_zero()
    }
}

/// A key that is given back with the future that holds it.
struct GivenBack<'a>(&'a Endpoint, &'a str);

impl Drop for GivenBack<'_> {
    fn drop(&mut self) {
        let mut keys = self.0.keys.lock().unwrap();
        if keys.get(self.1).is_some_and(|known| known.answer.is_none()) {
            keys.remove(self.1);
        }
    }
}

async fn create(endpoint: Data<Endpoint>, request: HttpRequest, body: String) -> HttpResponse {
    let header = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let slow = header("x-slow-ms").map_or(0, |ms| ms.parse().unwrap());
    let wish = Wish {
        key: header("idempotency-key").unwrap_or_default(),
        body,
        slow: Duration::from_millis(slow),
        fails: header("x-fail").is_some(),
    };
    let (status, body) = answer(endpoint.into_inner(), wish).await;
    HttpResponse::build(status).body(body)
}

async fn answer(endpoint: Arc<Endpoint>, wish: Wish) -> (StatusCode, String) {
    let flaw = endpoint.flaw;
    match flaw {
        Flaw::Unprotected => return endpoint.work(&wish).await,
        Flaw::Hangs => std::future::pending::<()>().await,
        _ => {}
    }
    let known = {
        let mut keys = endpoint.keys.lock().unwrap();
        let mut known = keys.get(&wish.key).cloned();
        if flaw == Flaw::ForgetsWhileItRuns && wish.is_slow() {
            endpoint.asked.send_modify(|asked| *asked.entry(wish.key.clone()).or_default() += 1);
            let times = endpoint.asked.borrow()[&wish.key];
            known = known.filter(|known| known.answer.is_some() || times != 3);
        }
        if known.is_none() && flaw != Flaw::CheckThenAct {
            let now = Known { request: wish.body.clone(), answer: None };
            keys.insert(wish.key.clone(), now);
        }
        known
    };
    match known {
        Some(known) if known.request != wish.body && flaw != Flaw::ComparesKeysOnly => {
            (StatusCode::UNPROCESSABLE_ENTITY, "another request".into())
        }
        Some(Known { answer: Some(answer), .. }) => answer,
        Some(_) if flaw == Flaw::FailsDuplicates => (StatusCode::INTERNAL_SERVER_ERROR, "duplicate key".into()),
        Some(_) if flaw == Flaw::HangsForDuplicates => std::future::pending().await,
        Some(_) => (StatusCode::CONFLICT, "running".into()),
        None => match flaw {
            Flaw::RunsAgainAfterReset => {
                let _held = GivenBack(&endpoint, &wish.key);
                run(&endpoint, &wish).await
            }
            Flaw::LosesItsKey => run(&endpoint, &wish).await,
            _ => spawn(async move { run(&endpoint, &wish).await }).await.unwrap(),
        },
    }
}

async fn run(endpoint: &Endpoint, wish: &Wish) -> (StatusCode, String) {
    let answer = endpoint.work(wish).await;
    endpoint.note(wish, answer.clone());
    answer
}

/// `POST /orders`.
pub fn app(
    endpoint: Data<Endpoint>,
) -> App<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<impl MessageBody>,
        Error = Error,
        InitError = (),
    >,
> {
    App::new().app_data(endpoint).route("/orders", web::post().to(create))
}
