//! Imports point down only: the picture of the house, kept true.
//!
//! A file of `src/` is cut into words, without its comments, its texts apart, and without its unit
//! tests; what it names is looked up in [`LAYERS`].

use std::{
    fs, iter,
    path::{Path, PathBuf},
};

/// Surface, lifecycle, SQL, values: what stands higher may use what stands lower or beside it.
const LAYERS: &[(u8, &[&str])] = &[
    (
        4,
        &[
            "lib",
            "admin",
            "middleware",
            "idempotency",
            "completer",
            "gauges",
            "inspector",
            "extract",
            "body",
            "case",
            "coding",
            "settle",
            "status",
            "document",
            "version",
            "guarded",
            "transition",
            "duplicate",
            "form_token",
            "inbox",
            "outbox",
            "once",
            "testing",
        ],
    ),
    (
        3,
        &[
            "ask",
            "atomic",
            "check",
            "claim",
            "decision",
            "drain",
            "engine",
            "lease",
            "migrations",
            "pool",
            "sweeper",
            "told",
            "transaction",
        ],
    ),
    (2, &["postgres"]),
    (
        1,
        &[
            "digest",
            "error",
            "fingerprint",
            "header",
            "isolation",
            "json",
            "keep",
            "key",
            "policy",
            "refusal",
            "request_id",
            "scope",
            "secret",
            "selection",
            "snapshot",
            "source",
            "telemetry",
            "token",
            // Of the tests alone; no layer knows what it is for.
            "failpoint",
        ],
    ),
];

/// What of actix a file below the surface may use: what a request and a response are made of.
const ACTIX_BELOW: &[&str] = &[
    "body",
    "http",
    "web::Bytes",
    "web::BytesMut",
    "web::Query",
    "HttpMessage",
    "HttpRequest",
    "HttpResponse",
    "Responder",
    "ResponseError",
];

/// The crates that speak to the database.
const DATABASE: &[&str] = &["bb8", "diesel", "diesel_async", "diesel_migrations", "tokio_postgres"];

/// Their errors, which `error.rs` turns into ours. `pool.rs` makes connections, and `check.rs` asks for
/// one error by name.
const DATABASE_ERRORS: &[&str] =
    &["ConnectionError", "ConnectionResult", "DatabaseErrorKind", "PoolError", "QueryError", "RunError"];
const MAY_NAME_ERRORS: &[&str] = &["error", "pool", "check", "postgres"];

/// What a user writes beside diesel's own words: their signatures speak in its types and hand its errors
/// on, and the statements that they make are sent in `postgres/`.
const EXTEND_DIESEL: &[&str] = &["version", "guarded", "transition", "duplicate", "inbox", "outbox"];
/// Types that only signatures need.
const IN_SIGNATURES: &[&str] = &["QueryFragment"];
/// SQL for a migration of the user's, which nobody here sends.
const SQL_TO_COPY: &[&str] = &["version/trigger.rs"];

/// What builds a query.
const QUERIES: &[&str] = &[
    "ExpressionMethods",
    "QueryDsl",
    "QueryFragment",
    "RunQueryDsl",
    "SimpleAsyncConnection",
    "batch_execute",
    "insert_into",
    "sql_query",
];

/// What takes a connection from a pool, or opens one beside it.
const CHECKOUTS: &[&str] = &["get_owned", "dedicated_connection"];

/// How a statement begins.
const STATEMENTS: &[&str] = &[
    "ALTER",
    "BEGIN",
    "COMMIT",
    "CREATE",
    "DELETE",
    "DROP",
    "INSERT",
    "LOCK",
    "ROLLBACK",
    "SAVEPOINT",
    "SELECT",
    "SET",
    "TRUNCATE",
    "UPDATE",
    "WITH",
];

fn layer(module: &str) -> Option<u8> {
    LAYERS.iter().find(|(_, modules)| modules.contains(&module)).map(|(layer, _)| *layer)
}

/// What a file does that its place does not allow. `file` is relative to `src/`.
fn violations(file: &str, source: &str) -> Vec<String> {
    let module = file.split(['/', '.']).next().unwrap();
    let Some(layer_of_file) = layer(module) else {
        return vec![format!("{file} has no layer: give it one in tests/it/architecture.rs")];
    };
    let (words, texts) = words(source);
    let extends_diesel = EXTEND_DIESEL.contains(&module);
    let mut found = Vec::new();

    for path in paths(&words) {
        let shown = path.join("::");
        let (head, rest) = (path[0].as_str(), path[1..].join("::"));
        match head {
            "crate" => match layer(&path[1]) {
                // A macro of ours, as its user's crate sees it.
                None if extends_diesel && path[1].starts_with(char::is_uppercase) => {}
                None => found.push(format!("{shown} goes through the crate's root")),
                Some(layer) if layer > layer_of_file => found.push(format!("{shown} is above")),
                Some(_) => {}
            },
            "actix_web" if layer_of_file == 2 => found.push(format!("{shown}: no actix among the SQL")),
            "actix_web" if layer_of_file < 4 && !ACTIX_BELOW.iter().any(|allowed| is_or_within(&rest, allowed)) => {
                found.push(format!("{shown}: a request is answered at the surface"));
            }
            _ if DATABASE.contains(&head) => {
                let in_a_signature = rest == "AsyncPgConnection";
                let allowed = match layer_of_file {
                    4 => in_a_signature || extends_diesel,
                    1 => module == "error",
                    _ => true,
                };
                if !allowed {
                    found.push(format!("{shown}: the database is spoken to below"));
                }
                if layer_of_file == 2 && (head == "bb8" || rest.contains("Pool")) && !file.ends_with("mod.rs") {
                    found.push(format!("{shown}: SQL takes a connection, never a pool"));
                }
            }
            _ => {}
        }
        let error = DATABASE_ERRORS.iter().find(|error| path.iter().any(|part| part == *error));
        if let Some(error) = error.filter(|_| !MAY_NAME_ERRORS.contains(&module) && !extends_diesel) {
            found.push(format!("{shown}: {error} is for error.rs to name"));
        }
    }

    let named =
        |names: &'static [&'static str]| names.iter().copied().filter(|name| words.iter().any(|word| word == name));
    if layer_of_file != 2 {
        let builds = named(QUERIES).filter(|name| !(extends_diesel && IN_SIGNATURES.contains(name)));
        found.extend(builds.map(|name| format!("{name}: queries are built in postgres/")));
        let begins = |text: &&String| STATEMENTS.contains(&text.split_whitespace().next().unwrap_or_default());
        let texts = texts.iter().filter(|_| !SQL_TO_COPY.contains(&file));
        found.extend(texts.filter(begins).map(|text| format!("{text:?} is SQL, and has its place in postgres/")));
    }
    if layer_of_file != 3 {
        found.extend(named(CHECKOUTS).map(|name| format!("{name}: the lifecycle checks out connections")));
    }
    if layer_of_file == 2 && !file.ends_with("mod.rs") {
        found.extend(named(&["PgPool"]).map(|name| format!("{name}: SQL takes a connection, never a pool")));
    }
    if module == "lib" {
        found.extend(named(&["fn", "impl", "struct"]).map(|name| format!("{name}: lib.rs is a contents page")));
        if source.lines().count() > 120 {
            found.push("lib.rs is longer than 120 lines".into());
        }
    }
    found.iter().map(|what| format!("src/{file}: {what}")).collect()
}

fn is_or_within(path: &str, allowed: &str) -> bool {
    path == allowed || path.strip_prefix(allowed).is_some_and(|rest| rest.starts_with("::"))
}

/// The identifiers and signs of a source, and its texts; without comments and what is only for tests.
fn words(source: &str) -> (Vec<String>, Vec<String>) {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    let chars: Vec<char> = source.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or(' ');
    let (mut words, mut texts) = (Vec::new(), Vec::new());
    let mut i = 0;
    while i < chars.len() {
        let start = i;
        match at(i) {
            '/' if at(i + 1) == '/' => i += chars[i..].iter().take_while(|c| **c != '\n').count(),
            'r' if at(i + 1) == '"' || at(i + 1) == '#' && at(i + 2) == '"' => {
                let end: Vec<char> = if at(i + 1) == '#' { vec!['"', '#'] } else { vec!['"'] };
                i += 1 + end.len();
                let begin = i;
                while i < chars.len() && !chars[i..].starts_with(&end) {
                    i += 1;
                }
                texts.push(chars[begin..i].iter().collect());
                i += end.len();
            }
            '"' => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                texts.push(chars[start + 1..i.min(chars.len())].iter().collect());
                i += 1;
            }
            // A character, and not a lifetime.
            '\'' if at(i + 1) == '\\' => i += 3 + chars[i + 3..].iter().take_while(|c| **c != '\'').count() + 1,
            '\'' if at(i + 2) == '\'' => i += 3,
            c if c.is_alphanumeric() || c == '_' => {
                i += chars[i..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
                words.push(chars[start..i].iter().collect());
            }
            ':' if at(i + 1) == ':' => {
                words.push("::".into());
                i += 2;
            }
            c => {
                if !c.is_whitespace() {
                    words.push(c.into());
                }
                i += 1;
            }
        }
    }
    (words, texts)
}

/// Every path of more than one part, those of `use` taken apart.
fn paths(words: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut i = 0;
    while i < words.len() {
        // `use<…>` in a bound imports nothing.
        i = if words[i] == "use" && words.get(i + 1).is_some_and(|next| next != "<") {
            tree(words, i + 1, &[], &mut found)
        } else if is_name(&words[i]) && (i == 0 || words[i - 1] != "::") {
            let length = 1 + words[i + 1..]
                .chunks(2)
                .take_while(|two| two[0] == "::" && two.len() == 2 && is_name(&two[1]))
                .count();
            found.push(words[i..].iter().step_by(2).take(length).cloned().collect());
            i + 2 * length - 1
        } else {
            i + 1
        };
    }
    found.retain(|path| path.len() > 1);
    found
}

/// One branch of a `use`, and where it ends.
fn tree(words: &[String], mut i: usize, prefix: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = prefix.to_vec();
    while let Some(word) = words.get(i) {
        match word.as_str() {
            "::" => {}
            "{" => {
                i += 1;
                while words.get(i).is_some_and(|word| word != "}") {
                    i = tree(words, i, &path, found);
                    i += usize::from(words.get(i).is_some_and(|word| word != "}"));
                }
                return i + 1;
            }
            "as" => i += 1,
            "," | "}" | ";" => break,
            name => path.push(name.into()),
        }
        i += 1;
    }
    found.push(path);
    i
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { iter::once(path).collect() })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    found.sort();
    found
}

#[test]
fn imports_point_down_only() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = files(&src);
    assert!(files.len() > 20, "{files:?}");
    let found: Vec<_> = files
        .iter()
        .flat_map(|path| {
            let file = path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
            violations(&file, &fs::read_to_string(path).unwrap())
        })
        .collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn what_points_up_is_found() {
    let bad = [
        ("key.rs", "use crate::claim::Claim;"),
        ("key.rs", "use crate::{header, postgres::{self, keys}};"),
        ("scope.rs", "fn f() { crate::engine::background::handle(); }"),
        ("claim.rs", "use crate::{\n    error::Error,\n    extract::IdemKey,\n};"),
        ("claim.rs", "use crate::IdemKey;"),
        ("sweeper.rs", "use actix_web::{http, dev::ServiceRequest};"),
        ("refusal.rs", "use actix_web::web::Data;"),
        ("snapshot.rs", "use actix_web::rt::spawn as go;"),
        ("postgres/keys.rs", "use actix_web::http::StatusCode;"),
        ("postgres/keys.rs", "use super::PgPool;"),
        ("postgres/sweep.rs", "use diesel_async::pooled_connection::bb8::Pool;"),
        ("policy.rs", "use diesel_async::AsyncPgConnection;"),
        ("middleware.rs", "use diesel::prelude::*;"),
        ("extract.rs", "fn f(c: &mut diesel_async::AsyncConnection) {}"),
        ("engine/store.rs", "use diesel::result::{DatabaseErrorKind, Error};"),
        ("claim.rs", "match error { diesel_async::pooled_connection::bb8::RunError::TimedOut => {} }"),
        ("claim.rs", "fn f() { diesel::sql_query(text); }"),
        ("engine/leases.rs", "use diesel_async::RunQueryDsl;"),
        ("sweeper.rs", "const S: &str = \"DELETE FROM idempotency_keys\";"),
        ("sweeper.rs", "const S: &str = r#\"\n  SELECT 1\"#;"),
        ("drain.rs", "conn.execute(\"BEGIN\")"),
        ("middleware.rs", "let conn = engine.store.pool.get_owned().await?;"),
        ("postgres/keys.rs", "let conn = pool.dedicated_connection().await?;"),
        ("lib.rs", "pub fn helper() {}"),
        ("lib.rs", &"//\n".repeat(121)),
        ("cache.rs", ""),
    ];
    for (file, source) in bad {
        assert!(!violations(file, source).is_empty(), "{file}: {source}");
    }
}

#[test]
fn what_is_allowed_is_not_found() {
    let good = [
        ("claim.rs", "use crate::{engine::{Engine, store::{Checkout, in_time}}, postgres::keys::{self, Row}};"),
        ("claim.rs", "use actix_web::http::StatusCode;"),
        ("snapshot.rs", "use actix_web::{HttpResponse, body::{BodySize, MessageBody}, web::{Bytes, BytesMut}};"),
        (
            "key.rs",
            "// use crate::claim;\n/// [`Claim`](crate::claim::Claim)\nfn f() -> &'static str { \"crate::claim::x\" }",
        ),
        ("key.rs", "fn quote(c: char) -> bool { c == '\"' || c == '\\'' }\nuse crate::header;"),
        ("key.rs", "use crate::header;\n#[cfg(test)]\nmod tests {\n    use crate::claim;\n}"),
        ("extract.rs", "use diesel_async::AsyncPgConnection;"),
        ("error.rs", "use diesel::result::{ConnectionError, Error as QueryError};"),
        ("check.rs", "const A: &str = \"GRANT SELECT, INSERT on it, and SELECT from it\";"),
        ("pool.rs", "use diesel::{ConnectionError, ConnectionResult};"),
        ("postgres/keys.rs", "use super::{AsyncPgConnection, statement};\nconst S: &str = \"SELECT 1\";"),
        ("lib.rs", "mod key;\npub use crate::{key::IdempotencyKey};"),
    ];
    for (file, source) in good {
        assert_eq!(violations(file, source), Vec::<String>::new());
    }
}
