(* T6 under AdamW, one coordinate: k idle steps after step s, closed form. torch decays x before the step and adds
   eps after the square root; m and v shrink by beta1 and beta2, both corrections go on counting. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum.
Open Scope R_scope.

Definition adamw_step (m v : R) (beta1 beta2 eps : R) (s j : nat) : R :=
  beta1 ^ j * m / (1 - beta1 ^ (s + j)) / (sqrt (beta2 ^ j * v / (1 - beta2 ^ (s + j))) + eps).

(* what torch does at an idle step: zero gradient *)
Definition adamw_idle (x m v : nat -> R) (eta lam beta1 beta2 eps : R) (s : nat) : Prop :=
  forall k, m (S k) = beta1 * m k /\ v (S k) = beta2 * v k /\
    x (S k) = (1 - eta * lam) * x k
      - eta * (m (S k) / (1 - beta1 ^ (s + S k)) / (sqrt (v (S k) / (1 - beta2 ^ (s + S k))) + eps)).

Theorem adamw_idle_closed : forall x m v eta lam beta1 beta2 eps s k,
  adamw_idle x m v eta lam beta1 beta2 eps s ->
  x k = (1 - eta * lam) ^ k * x 0%nat
    - eta * psum (fun i => (1 - eta * lam) ^ (k - S i) * adamw_step (m 0%nat) (v 0%nat) beta1 beta2 eps s (S i)) k.
Proof.
  intros x m v eta lam beta1 beta2 eps s k H.
  assert (Hm : forall j, m j = beta1 ^ j * m 0%nat).
  { induction j as [|j IH]; [simpl; ring|]. destruct (H j) as [-> _]. rewrite IH. simpl. ring. }
  assert (Hv : forall j, v j = beta2 ^ j * v 0%nat).
  { induction j as [|j IH]; [simpl; ring|]. destruct (H j) as [_ [-> _]]. rewrite IH. simpl. ring. }
  induction k as [|k IH]; [simpl; ring|].
  destruct (H k) as [_ [_ Hx]]. rewrite psum_S, Nat.sub_diag.
  assert (E : psum (fun i => (1 - eta * lam) ^ (S k - S i)
      * adamw_step (m 0%nat) (v 0%nat) beta1 beta2 eps s (S i)) k
    = (1 - eta * lam) * psum (fun i => (1 - eta * lam) ^ (k - S i)
      * adamw_step (m 0%nat) (v 0%nat) beta1 beta2 eps s (S i)) k).
  { rewrite <- psum_scal. apply psum_ext. intros i Hi.
    replace (S k - S i)%nat with (S (k - S i)) by lia. rewrite <- tech_pow_Rmult. ring. }
  rewrite E, Hx, IH, (Hm (S k)), (Hv (S k)).
  fold (adamw_step (m 0%nat) (v 0%nat) beta1 beta2 eps s (S k)).
  rewrite <- (tech_pow_Rmult _ k). rewrite pow_O. ring.
Qed.

(* the two numbers of theory: m shrinks by beta1^k, v by beta2^k *)
Theorem adamw_idle_state : forall x m v eta lam beta1 beta2 eps s, adamw_idle x m v eta lam beta1 beta2 eps s ->
  forall k, m k = beta1 ^ k * m 0%nat /\ v k = beta2 ^ k * v 0%nat.
Proof.
  intros x m v eta lam beta1 beta2 eps s H. induction k as [|k [IHm IHv]]; [split; simpl; ring|].
  destruct (H k) as [-> [-> _]]. rewrite IHm, IHv. simpl. split; ring.
Qed.
