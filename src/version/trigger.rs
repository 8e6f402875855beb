//! For writers who do not play along.

/// SQL for a migration of yours: a trigger that refuses an update of `table` which does not raise
/// `column`.
///
/// Versions protect only against those who look at them. A plain `UPDATE`, by psql, another service or
/// a forgotten function, changes the row and leaves its version, and the next stale writer wins. With the
/// trigger such an update fails as a check violation (23514) of the constraint `TABLE_COLUMN_raised`; the
/// changes of this crate pass.
///
/// ```
/// let up = actix_idempotency::version::trigger("orders", "version");
/// assert!(up.contains(r#"BEFORE UPDATE ON "orders""#));
/// std::fs::write(std::env::temp_dir().join("up.sql"), up)?; // migrations/…_orders_version/up.sql
/// # Ok::<_, std::io::Error>(())
/// ```
///
/// It reads, for `trigger("orders", "version")`:
///
/// ```sql
/// CREATE FUNCTION "orders_version_raised"() RETURNS trigger LANGUAGE plpgsql AS $raised$
/// BEGIN
///     RAISE EXCEPTION USING
///         ERRCODE = 'check_violation',
///         MESSAGE = format('an update of %I must raise %I', TG_TABLE_NAME, TG_ARGV[0]),
///         SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, COLUMN = TG_ARGV[0], CONSTRAINT = TG_NAME;
/// END
/// $raised$;
/// CREATE TRIGGER "orders_version_raised" BEFORE UPDATE ON "orders" FOR EACH ROW
///     WHEN ((NEW."version" > OLD."version") IS NOT TRUE)
///     EXECUTE FUNCTION "orders_version_raised"('version');
/// ```
///
/// and `down.sql` is `DROP TRIGGER "orders_version_raised" ON "orders"; DROP FUNCTION
/// "orders_version_raised"();`. A table of another schema than the search path's first is named
/// `schema.table`; the function is made where the search path says.
///
/// **Do I need it?** Where this crate is the only writer, no. It costs a comparison for each updated row;
/// the function is called only to refuse. A `BEFORE` trigger whose name sorts after this one's can still
/// lower the version.
#[must_use]
pub fn trigger(table: &str, column: &str) -> String {
    let bare = table.rsplit('.').next().unwrap_or(table);
    let name = quoted(&format!("{bare}_{column}_raised"));
    let on = table.split('.').map(quoted).collect::<Vec<_>>().join(".");
    let (column, argument) = (quoted(column), column.replace('\'', "''"));
    format!(
        r#"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $raised$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'check_violation',
        MESSAGE = format('an update of %I must raise %I', TG_TABLE_NAME, TG_ARGV[0]),
        SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, COLUMN = TG_ARGV[0], CONSTRAINT = TG_NAME;
END
$raised$;
CREATE TRIGGER {name} BEFORE UPDATE ON {on} FOR EACH ROW
    WHEN ((NEW.{column} > OLD.{column}) IS NOT TRUE)
    EXECUTE FUNCTION {name}('{argument}');
"#
    )
}

fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}
