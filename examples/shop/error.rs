//! What the shop says when it cannot do what was asked.

use actix_web::{HttpResponse, ResponseError, http::StatusCode};
use diesel::result::{DatabaseErrorKind, Error as QueryError};
use serde_json::json;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ShopError {
    #[error("say who you are: Authorization: Bearer NAME")]
    Anonymous,
    #[error("quantity must be at least 1")]
    Quantity,
    #[error("there is no such thing")]
    NotFound,
    #[error("not enough in stock")]
    OutOfStock,
    #[error("one to a customer in this campaign")]
    CampaignUsed,
    #[error("you have this coupon already")]
    CouponClaimed,
    #[error("this attempt fails, as X-Demo-Fail asked")]
    Demo(StatusCode),
    #[error("the database failed")]
    Database(QueryError),
    #[error("no connection")]
    NoConnection,
}

impl From<QueryError> for ShopError {
    fn from(error: QueryError) -> Self {
        match &error {
            QueryError::NotFound => Self::NotFound,
            QueryError::DatabaseError(DatabaseErrorKind::UniqueViolation, info)
                if info.constraint_name() == Some("orders_customer_product_campaign_key") =>
            {
                Self::CampaignUsed
            }
            QueryError::DatabaseError(DatabaseErrorKind::UniqueViolation, info)
                if info.constraint_name() == Some("coupons_customer_coupon_key") =>
            {
                Self::CouponClaimed
            }
            QueryError::DatabaseError(DatabaseErrorKind::ForeignKeyViolation, _) => Self::NotFound,
            _ => Self::Database(error),
        }
    }
}

impl ResponseError for ShopError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Anonymous => StatusCode::UNAUTHORIZED,
            Self::Quantity => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::OutOfStock | Self::CampaignUsed | Self::CouponClaimed => StatusCode::CONFLICT,
            Self::Demo(status) => *status,
            Self::Database(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NoConnection => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn error_response(&self) -> HttpResponse {
        if let Self::Database(error) = self {
            tracing::error!(%error, "the database failed");
        }
        HttpResponse::build(self.status_code()).json(json!({"error": self.to_string()}))
    }
}
