//! An order for each message: the key of the request is the message id.

use actix_idempotency::{Handled, Inbox, InboxError, PgPool, Received};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    web::{self, Data, Json, ServiceConfig},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, TransactionManager};

use crate::server::{NewOrder, answer, insert_order};

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

pub fn routes(config: &mut ServiceConfig) {
    config
        .app_data(Data::new(Inbox::new("bench")))
        .route("/receive", web::post().to(receive))
        .route("/handle", web::post().to(handle));
}

fn id_of(request: &HttpRequest) -> &str {
    request.headers().get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default()
}

async fn receive(
    request: HttpRequest,
    pool: Data<PgPool>,
    inbox: Data<Inbox>,
    new: Json<NewOrder>,
) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    Manager::begin_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    if inbox.receive(&mut conn, id_of(&request)).await? != Received::First {
        return Err(ErrorInternalServerError("a duplicate"));
    }
    let order = insert_order(&mut conn, &new).await?;
    Manager::commit_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    Ok(answer(&order))
}

async fn handle(
    request: HttpRequest,
    pool: Data<PgPool>,
    inbox: Data<Inbox>,
    new: Json<NewOrder>,
) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let handled = inbox
        .handle(&mut conn, id_of(&request), async |conn| {
            insert_order(conn, &new).await.map_err(|_| InboxError::TransactionMisused)
        })
        .await
        .map_err(ErrorInternalServerError)?;
    match handled {
        Handled::Handled(order) => Ok(answer(&order)),
        Handled::Duplicate => Err(ErrorInternalServerError("a duplicate")),
    }
}
