//! The small examples: the curl lines at their heads are answered as their comments say.

use std::fs;

use crate::support::{
    db::Db,
    example::{Example, Session},
};

/// The lines of an example's head that are for a shell.
fn lines(name: &str) -> String {
    let source = fs::read_to_string(format!("{}/examples/{name}.rs", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let head = source.lines().map_while(|line| line.strip_prefix("//!"));
    let lines = head.filter_map(|line| line.strip_prefix("     ")).filter(|line| !line.starts_with("./with-postgres"));
    lines.collect::<Vec<_>>().join("\n")
}

async fn answers(name: &str) -> (Db, Vec<u16>) {
    let db = Db::empty().await;
    let example = Example::start(name, &db.url, &[]);
    let answers = Session::at(&example, &lines(name)).answers(async || true).await;
    (db, answers)
}

#[actix_web::test]
async fn versions_are_shown_by_curl_as_the_example_says() {
    if !Session::can_run() {
        return;
    }
    let (db, answers) = answers("version").await;
    assert_eq!(answers, [200, 200, 412, 428, 400, 204, 200]);
    assert!(db.is("(SELECT (views, version) = (1, 2) FROM notes WHERE id = 2)").await);
}

#[actix_web::test]
async fn transitions_are_shown_by_curl_as_the_example_says() {
    if !Session::can_run() {
        return;
    }
    let (db, answers) = answers("transition").await;
    assert_eq!(answers, [200, 200, 409, 404]);
    // The forty at once, too.
    assert_eq!(db.number("SELECT count(*) AS value FROM history").await, 2);
    assert!(db.is("(SELECT bool_and(callbacks = 1) FROM payments)").await);
}

#[actix_web::test]
async fn the_inspector_is_asked_by_curl_as_the_example_says() {
    if !Session::can_run() {
        return;
    }
    let (db, answers) = answers("inspector").await;
    assert_eq!(answers, [201, 201, 422, 500, 401, 200, 200, 400]);
    assert_eq!(db.keys().await, 2);
}
