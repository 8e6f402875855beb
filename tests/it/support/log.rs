//! What is said through `tracing`, heard for the whole process: handlers run on threads of their own,
//! which a subscriber of the test's thread would not hear. A test finds its own lines by its row, and so
//! needs a key that no other test has: the id of a row is the same in every database.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError},
    thread,
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{Context, SubscriberExt},
    registry::{LookupSpan, Registry},
};

pub type Fields = BTreeMap<String, String>;

/// An event, or a span that has ended.
#[derive(Debug)]
pub struct Line {
    pub level: Level,
    /// Those of a span are its own; an event has those of its spans in `within`.
    pub fields: Fields,
    pub within: Fields,
    pub is_span: bool,
    /// As [`thread()`] names it.
    pub thread: String,
}

impl Line {
    pub fn get(&self, field: &str) -> Option<&str> {
        self.fields.get(field).map(String::as_str)
    }

    fn id(&self) -> Option<&String> {
        self.fields.get("id").or(self.within.get("id"))
    }
}

/// Asked all the time by tests that wait for a line, while handlers write: so by id.
#[derive(Default)]
struct Heard {
    all: Vec<Arc<Line>>,
    by_id: HashMap<String, Vec<Arc<Line>>>,
}

static HEARD: Mutex<Option<Heard>> = Mutex::new(None);

fn heard() -> MutexGuard<'static, Option<Heard>> {
    HEARD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hear(line: Line) {
    let line = Arc::new(line);
    let mut heard = heard();
    let heard = heard.get_or_insert_default();
    if let Some(id) = line.id() {
        heard.by_id.entry(id.clone()).or_default().push(Arc::clone(&line));
    }
    heard.all.push(line);
}

/// From now on.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ours = Targets::new().with_target("actix_idempotency", Level::TRACE);
        tracing::subscriber::set_global_default(Registry::default().with(Ears.with_filter(ours))).unwrap();
    });
}

/// The name of the thread that asks.
pub fn thread() -> String {
    format!("{:?}", thread::current().id())
}

/// Every line so far.
pub fn all() -> Vec<Arc<Line>> {
    heard().as_ref().map(|heard| heard.all.clone()).unwrap_or_default()
}

/// The events on a thread, oldest first: a server with one worker has one of its own.
pub fn on(thread: &str) -> Vec<Arc<Line>> {
    all().into_iter().filter(|line| !line.is_span && line.thread == thread).collect()
}

fn about(id: &str) -> Vec<Arc<Line>> {
    heard().as_ref().and_then(|heard| heard.by_id.get(id).cloned()).unwrap_or_default()
}

/// The events about a row, by the prefix of its id, oldest first.
pub fn events(id: &str) -> Vec<Arc<Line>> {
    about(id).into_iter().filter(|line| !line.is_span).collect()
}

/// How many events of this name there are about a row.
pub fn count(id: &str, event: &str) -> usize {
    events(id).iter().filter(|line| line.get("event") == Some(event)).count()
}

/// The ended spans of the requests for a row.
pub fn spans(id: &str) -> Vec<Fields> {
    about(id).iter().filter(|line| line.is_span).map(|line| line.fields.clone()).collect()
}

struct Ears;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Ears {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Writer(&mut fields));
        context.span(id).unwrap().extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        values.record(&mut Writer(span.extensions_mut().get_mut().unwrap()));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let (mut fields, mut within) = (Fields::new(), Fields::new());
        event.record(&mut Writer(&mut fields));
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            within.extend(span.extensions().get::<Fields>().unwrap().clone());
        }
        hear(Line { level: *event.metadata().level(), fields, within, is_span: false, thread: thread() });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        let fields = span.extensions().get::<Fields>().unwrap().clone();
        let level = *span.metadata().level();
        hear(Line { level, fields, within: Fields::new(), is_span: true, thread: thread() });
    }
}

struct Writer<'a>(&'a mut Fields);

impl Visit for Writer<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}"));
    }
}
