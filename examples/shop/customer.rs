//! Customers, and who is let in.

use actix_web::{
    HttpMessage, HttpRequest, ResponseError, Result,
    body::{EitherBody, MessageBody},
    dev::{ServiceRequest, ServiceResponse},
    http::header,
    middleware::Next,
};

use crate::error::ShopError;

/// Whoever `Authorization: Bearer NAME` names: a demo, without a password. Handlers take it as `web::ReqData<Customer>`.
#[derive(Clone)]
pub struct Customer(pub String);

impl Customer {
    /// Whose keys they are: whoever was let in.
    pub fn principal(request: &HttpRequest) -> Option<String> {
        request.extensions().get::<Self>().map(|customer| customer.0.clone())
    }
}

/// Outside of Idempotency: whoever is not let in gets nothing of what is stored, whatever key he sends.
pub async fn authenticate<B: MessageBody>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>> {
    let bearer =
        request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let Some(name) = bearer.map(str::to_owned) else {
        return Ok(request.into_response(ShopError::Anonymous.error_response()).map_into_right_body());
    };
    request.extensions_mut().insert(Customer(name));
    Ok(next.call(request).await?.map_into_left_body())
}
