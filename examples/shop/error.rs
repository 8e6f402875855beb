//! What the shop says when it cannot do what was asked.

use actix_idempotency::{DuplicateError, Duplicates, GuardedError, TransitionError, VersionError};
use actix_web::{HttpResponse, ResponseError, http::StatusCode};
use diesel::result::Error as QueryError;
use serde_json::json;
use thiserror::Error;

use crate::schema::Status;

#[derive(Debug, Error)]
pub enum ShopError {
    #[error("say who you are: Authorization: Bearer NAME")]
    Anonymous,
    #[error("quantity must be at least 1")]
    Quantity,
    #[error("there is no such thing")]
    NotFound,
    #[error("an order that is paid is no longer changed")]
    Paid,
    #[error("this attempt fails, as X-Demo-Fail asked")]
    Demo(StatusCode),
    #[error("no connection")]
    NoConnection,
    #[error(transparent)]
    Version(#[from] VersionError),
    #[error(transparent)]
    Stock(#[from] GuardedError),
    #[error(transparent)]
    State(#[from] TransitionError<Status>),
    #[error(transparent)]
    Database(DuplicateError),
}

/// The last line of defence, in words.
fn duplicates() -> Duplicates {
    Duplicates::new()
        .code("orders_customer_product_campaign_key", "campaign-used", "One to a customer in this campaign.")
        .code("coupons_customer_coupon_key", "coupon-claimed", "You have this coupon already.")
}

impl From<QueryError> for ShopError {
    fn from(error: QueryError) -> Self {
        match error {
            QueryError::NotFound => Self::NotFound,
            error => Self::Database(duplicates().explain(error)),
        }
    }
}

impl ShopError {
    /// What went wrong in a line of defence knows its own answer.
    fn defence(&self) -> Option<&dyn ResponseError> {
        match self {
            Self::Version(error) => Some(error),
            Self::Stock(error) => Some(error),
            Self::State(error) => Some(error),
            Self::Database(error) => Some(error),
            _ => None,
        }
    }
}

impl ResponseError for ShopError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Anonymous => StatusCode::UNAUTHORIZED,
            Self::Quantity => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Paid => StatusCode::CONFLICT,
            Self::Demo(status) => *status,
            Self::NoConnection => StatusCode::SERVICE_UNAVAILABLE,
            _ => self.defence().map_or(StatusCode::INTERNAL_SERVER_ERROR, ResponseError::status_code),
        }
    }

    fn error_response(&self) -> HttpResponse {
        match self.defence() {
            Some(error) => error.error_response(),
            None => HttpResponse::build(self.status_code()).json(json!({"error": self.to_string()})),
        }
    }
}
