//! What the check at start-up asks of the tables.

use diesel::{
    QueryResult, Queryable,
    sql_types::{Array, Bool, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

/// What is expected of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) name: &'static str,
    /// A constraint that only its newest migration makes.
    pub(crate) mark: &'static str,
    /// Privileges, with blanks between them.
    pub(crate) needs: &'static str,
}

/// Those of this crate. The first one is checked before, and is an error where it cannot be used.
pub(crate) const EXPECTED: [Expected; 5] = [
    Expected { name: "idempotency_keys", mark: "idempotency_keys_acted_check", needs: "SELECT INSERT UPDATE DELETE" },
    Expected { name: "idempotency_steps", mark: "idempotency_steps_name_check", needs: "SELECT INSERT UPDATE" },
    Expected { name: "idempotency_inbox", mark: "idempotency_inbox_times_check", needs: "SELECT INSERT UPDATE DELETE" },
    Expected {
        name: "idempotency_inbox_attempts",
        mark: "idempotency_inbox_attempts_times_check",
        needs: "SELECT INSERT UPDATE DELETE",
    },
    Expected {
        name: "idempotency_outbox",
        mark: "idempotency_outbox_parked_check",
        needs: "SELECT INSERT UPDATE DELETE",
    },
];

/// A constraint that only the newest migration of the keys makes.
pub(crate) const NEWEST: &str = EXPECTED[0].mark;

/// What a table is like.
#[derive(Debug, Queryable)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) is_there: bool,
    pub(crate) is_unlogged: bool,
    /// That of the table, or of the one that its large values are in.
    pub(crate) autovacuum_is_off: bool,
    pub(crate) is_newest: bool,
    pub(crate) may_be_used: bool,
    pub(crate) invalid_indexes: Vec<String>,
}

statement! {
    /// Options are kept as they were written.
    struct Tables { names: &'a [&'a str], marks: &'a [&'a str], needs: &'a [&'a str] }
    returns (Text, Bool, Bool, Bool, Bool, Bool, Array<Text>);
    [
        "SELECT t.name, c.oid IS NOT NULL, coalesce(c.relpersistence = 'u', false), \
         EXISTS (SELECT FROM pg_class AS o CROSS JOIN LATERAL pg_options_to_table(o.reloptions) AS set \
         WHERE o.oid IN (c.oid, c.reltoastrelid) \
         AND CASE WHEN set.option_name = 'autovacuum_enabled' THEN NOT set.option_value::boolean ELSE false END), \
         EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid AND conname = t.mark), \
         coalesce((SELECT bool_and(has_table_privilege(c.oid, need)) \
         FROM unnest(string_to_array(t.needs, ' ')) AS need), false), \
         ARRAY(SELECT i.indexrelid::regclass::text FROM pg_index AS i WHERE i.indrelid = c.oid AND NOT i.indisvalid \
         ORDER BY 1) \
         FROM unnest(", (names: Array<Text>), ", ", (marks: Array<Text>), ", ", (needs: Array<Text>),
        ") WITH ORDINALITY AS t (name, mark, needs, place) LEFT JOIN pg_class AS c ON c.oid = to_regclass(t.name) \
         ORDER BY t.place",
    ]
}

/// One for each that is expected, in their order.
pub(crate) async fn tables(conn: &mut AsyncPgConnection) -> QueryResult<Vec<Table>> {
    let names = EXPECTED.map(|table| table.name);
    let marks = EXPECTED.map(|table| table.mark);
    let needs = EXPECTED.map(|table| table.needs);
    Tables { names: &&names[..], marks: &&marks[..], needs: &&needs[..] }.load(conn).await
}
