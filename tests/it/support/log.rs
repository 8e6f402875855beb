//! What is said through `tracing`, heard for the whole process: handlers run on threads of their own,
//! which a subscriber of the test's thread would not hear. A test finds its own lines by its row, and so
//! needs a key that no other test has: the id of a row is the same in every database.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, MutexGuard, Once, PoisonError},
    thread,
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer, filter::filter_fn, layer::Context, layer::SubscriberExt, registry::LookupSpan, registry::Registry,
};

pub type Fields = BTreeMap<String, String>;

/// An event, or a span that has ended.
#[derive(Debug, Clone)]
pub struct Line {
    pub level: Level,
    pub target: String,
    /// Those of a span are its own; an event has those of its spans in `within`.
    pub fields: Fields,
    pub within: Fields,
    pub is_span: bool,
    /// As `thread()` names it.
    pub thread: String,
}

impl Line {
    pub fn get(&self, field: &str) -> Option<&str> {
        self.fields.get(field).map(String::as_str)
    }

    fn is_about(&self, id: &str) -> bool {
        [&self.fields, &self.within].iter().any(|fields| fields.get("id").is_some_and(|found| found == id))
    }
}

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

fn lines() -> MutexGuard<'static, Vec<Line>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Ours and the framework's; the clients of the tests have secrets of their own.
        let actix = filter_fn(|metadata| metadata.target().starts_with("actix"));
        tracing::subscriber::set_global_default(Registry::default().with(Ears.with_filter(actix))).unwrap();
    });
}

/// Every line so far.
pub fn all() -> Vec<Line> {
    lines().clone()
}

/// The events on a thread, oldest first: a server with one worker has one of its own.
pub fn on(thread: &str) -> Vec<Line> {
    lines().iter().filter(|line| !line.is_span && line.thread == thread).cloned().collect()
}

/// The thread that asks.
pub fn thread() -> String {
    format!("{:?}", thread::current().id())
}

/// The events about a row, by the prefix of its id, oldest first.
pub fn events(id: &str) -> Vec<Line> {
    lines().iter().filter(|line| !line.is_span && line.is_about(id)).cloned().collect()
}

/// How many events of this name there are about a row.
pub fn count(id: &str, event: &str) -> usize {
    events(id).iter().filter(|line| line.get("event") == Some(event)).count()
}

/// The ended spans of the requests for a row.
pub fn spans(id: &str) -> Vec<Fields> {
    lines().iter().filter(|line| line.is_span && line.is_about(id)).map(|line| line.fields.clone()).collect()
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
        let metadata = event.metadata();
        lines().push(Line {
            level: *metadata.level(),
            target: metadata.target().into(),
            fields,
            within,
            is_span: false,
            thread: thread(),
        });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        let fields = span.extensions().get::<Fields>().unwrap().clone();
        let (level, target) = (*span.metadata().level(), span.metadata().target().to_owned());
        lines().push(Line { level, target, fields, within: Fields::new(), is_span: true, thread: thread() });
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
