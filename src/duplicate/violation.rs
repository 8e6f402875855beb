//! A unique violation, by the name of its constraint, as an error of the service's own.

use std::fmt;

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::{DatabaseErrorKind, Error as QueryError};
use diesel_async::AsyncPgConnection;

use crate::{
    error::{code_of, refuse},
    postgres::savepoint,
    refusal::{Code, Refusal},
    version::{Race, Retryable},
};

/// A unique constraint that was violated. The values that were refused are not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    constraint: String,
    table: Option<String>,
}

impl Duplicate {
    /// What an error says, if it is a unique violation.
    #[must_use]
    pub fn of(error: &QueryError) -> Option<Self> {
        match error {
            QueryError::DatabaseError(DatabaseErrorKind::UniqueViolation, info) => Some(Self {
                constraint: info.constraint_name()?.to_owned(),
                table: info.table_name().map(str::to_owned),
            }),
            _ => None,
        }
    }

    /// The constraint, or the unique index. Of a partitioned table it is that of the partition.
    #[must_use]
    pub fn constraint(&self) -> &str {
        &self.constraint
    }

    /// The table, or the partition.
    #[must_use]
    pub fn table(&self) -> Option<&str> {
        self.table.as_deref()
    }
}

/// What the unique constraints mean: which error of yours each of them is.
///
/// With codes, for an answer at once: 409 problem+json with your `code`.
///
/// ```no_run
/// # diesel::table! { orders (id) { id -> BigInt, product_id -> BigInt, } }
/// use actix_idempotency::{Duplicates, IdemTx};
/// use actix_web::{HttpResponse, Result, web};
/// use diesel::prelude::*;
/// use diesel_async::RunQueryDsl;
///
/// async fn create(mut tx: IdemTx, product: web::Path<i64>) -> Result<HttpResponse> {
///     let id: i64 = Duplicates::new()
///         .code("orders_user_product_campaign_key", "already-ordered", "One order for each campaign.")
///         .run(&mut tx, async |conn| {
///             diesel::insert_into(orders::table)
///                 .values(orders::product_id.eq(*product))
///                 .returning(orders::id)
///                 .get_result(conn)
///                 .await
///         })
///         .await?;
///     Ok(HttpResponse::Created().json(id))
/// }
/// ```
///
/// With errors of your own, which say what else failed by `From<diesel::result::Error>`:
///
/// ```
/// use actix_idempotency::Duplicates;
/// use diesel::result::Error as QueryError;
///
/// #[derive(Debug)]
/// enum ShopError {
///     AlreadyOrdered,
///     Database(QueryError),
/// }
///
/// impl From<QueryError> for ShopError {
///     fn from(error: QueryError) -> Self {
///         Self::Database(error)
///     }
/// }
///
/// let duplicates =
///     Duplicates::<ShopError>::new().on("orders_user_product_campaign_key", |_| ShopError::AlreadyOrdered);
/// assert!(matches!(duplicates.explain(QueryError::NotFound), ShopError::Database(QueryError::NotFound)));
/// ```
///
/// Whatever is not declared passes through untouched: a violation of another constraint is a surprise, and
/// no answer.
///
/// # Partitions
///
/// A partition reports the constraint of its own (`orders_2026_07_user_id_product_id_key`), not that of its
/// parent: [`on_any`](Self::on_any) takes a predicate on the name.
pub struct Duplicates<E = DuplicateError> {
    rules: Vec<Rule<E>>,
}

struct Rule<E> {
    applies: Box<dyn Fn(&str) -> bool + Send + Sync>,
    explain: Box<dyn Fn(&Duplicate) -> E + Send + Sync>,
}

impl<E> Default for Duplicates<E> {
    fn default() -> Self {
        Self { rules: Vec::new() }
    }
}

impl<E> Duplicates<E> {
    /// No constraint means anything yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What a violation of the constraint, or unique index, with this name is. Where several declarations
    /// fit, the first one counts.
    #[must_use]
    pub fn on(self, constraint: &'static str, explain: impl Fn(&Duplicate) -> E + Send + Sync + 'static) -> Self {
        self.on_any(move |name| name == constraint, explain)
    }

    /// The same for all constraints whose name fits.
    #[must_use]
    pub fn on_any(
        mut self,
        applies: impl Fn(&str) -> bool + Send + Sync + 'static,
        explain: impl Fn(&Duplicate) -> E + Send + Sync + 'static,
    ) -> Self {
        self.rules.push(Rule { applies: Box::new(applies), explain: Box::new(explain) });
        self
    }

    /// The error that this is. It heals nothing: in a transaction, the statement that failed has aborted
    /// it. See [`run`](Self::run).
    pub fn explain(&self, error: QueryError) -> E
    where
        E: From<QueryError>,
    {
        self.known(&error).unwrap_or_else(|| error.into())
    }

    fn known(&self, error: &QueryError) -> Option<E> {
        let duplicate = Duplicate::of(error)?;
        let rule = self.rules.iter().find(|rule| (rule.applies)(&duplicate.constraint))?;
        Some((rule.explain)(&duplicate))
    }

    /// Runs statements in a savepoint, or in a transaction of their own outside one, and explains what
    /// failed. A transaction around it goes on, with nothing of what they did. That is three round trips
    /// more than the statements themselves; where nothing goes on, [`explain`](Self::explain) costs none:
    /// `….await.map_err(|error| duplicates.explain(error))?`.
    ///
    /// # Errors
    ///
    /// [`explain`](Self::explain)s the closure's error, and that of a constraint deferred to COMMIT. An `Ok` of a
    /// closure that has swallowed an error is what Postgres says to the next statement.
    pub async fn run<T>(
        &self,
        conn: &mut AsyncPgConnection,
        statements: impl AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, QueryError>,
    ) -> Result<T, E>
    where
        E: From<QueryError>,
    {
        savepoint::begin(conn).await.map_err(|error| self.explain(error))?;
        let mut outcome = statements(conn).await;
        if outcome.is_ok()
            && let Err(error) = savepoint::check(conn).await
        {
            outcome = Err(error);
        }
        savepoint::end(conn, outcome).await.map_err(|error| self.explain(error))
    }
}

impl Duplicates<DuplicateError> {
    /// Answers a violation of this constraint by 409 problem+json with `code`, in kebab-case like
    /// ours, and `detail`, a sentence for people.
    #[must_use]
    pub fn code(self, constraint: &'static str, code: &'static str, detail: &'static str) -> Self {
        self.on(constraint, move |duplicate| DuplicateError::Duplicate { duplicate: duplicate.clone(), code, detail })
    }
}

impl<E> fmt::Debug for Duplicates<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Duplicates").field("rules", &self.rules.len()).finish()
    }
}

/// What [`Duplicates::code`] makes of a violation, and everything else that may fail.
///
/// With `?` in a handler: 409 with the code that was declared; else 409 `serialization` or
/// `constraint-violated`, 503 `store-unavailable`, 500 `query-failed`.
#[derive(Debug)]
#[non_exhaustive]
pub enum DuplicateError {
    /// A constraint that was declared.
    Duplicate {
        /// Which.
        duplicate: Duplicate,
        /// The code for clients.
        code: &'static str,
        /// The sentence for people.
        detail: &'static str,
    },
    /// Anything else.
    Query(QueryError),
}

impl fmt::Display for DuplicateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Duplicate { duplicate, code, .. } => write!(f, "{code}: a duplicate by {}", duplicate.constraint),
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl std::error::Error for DuplicateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Duplicate { .. } => None,
            Self::Query(error) => Some(error),
        }
    }
}

impl From<QueryError> for DuplicateError {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl Retryable for DuplicateError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Duplicate { .. } => None,
            Self::Query(error) => error.lost_race(),
        }
    }

    fn failed(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl ResponseError for DuplicateError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Duplicate { .. } => Code::Duplicate.status(),
            Self::Query(error) => code_of(error).status(),
        }
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Duplicate { code, detail, .. } => {
                Refusal::new(Code::Duplicate).coded(code).detailed(*detail).error_response()
            }
            Self::Query(error) => refuse("a statement failed", error).error_response(),
        }
    }
}
